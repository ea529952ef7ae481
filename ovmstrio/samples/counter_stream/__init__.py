"""Sample counter_stream: a node that answers one request with many responses."""
