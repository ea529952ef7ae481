"""An HTTP server on trio: routes, the fast path and the Quart application."""
