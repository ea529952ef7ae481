"""HTTP/1.1: listeners, connections, the fast path and the application behind it."""
