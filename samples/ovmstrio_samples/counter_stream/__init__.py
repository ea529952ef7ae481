"""A node that answers one request with many responses."""
