"""HTTP/1.1 server for REST: fast path for hot routes, Quart application for the rest."""
