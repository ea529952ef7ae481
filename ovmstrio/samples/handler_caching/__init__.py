"""Sample handler_caching: more models than fit into memory, loaded on demand."""
