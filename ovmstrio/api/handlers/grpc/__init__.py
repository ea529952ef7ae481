"""Services of users over gRPC: the calls of their ``.proto``, answered by the methods of their handlers."""
