"""User code in threads and processes: calls, worker processes and the messages between them."""
