"""Public API for user code: calculators, custom nodes, handlers, Ops, batching and service kinds."""
