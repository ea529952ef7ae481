"""gRPC services of users: their ``.proto``, compiled and imported, and the handlers behind them."""
