"""Several worker processes as one server: supervisor, connection handoff, shared state and RPC."""
