"""Sample handler_batching: server-side batching, where one call answers many clients."""
