"""The public surface for user code: calculators, custom nodes, handlers, Ops, batching and kinds of services."""
