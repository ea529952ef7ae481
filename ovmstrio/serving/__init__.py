"""Services by name: registry, loading, admission, batching, the data plane and shared memory."""
