"""Custom nodes in shared libraries: the C interface, loading, and nodes in worker processes."""
