"""User code in threads and worker processes: one channel, one process class, one thread pool."""
