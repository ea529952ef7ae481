"""Listeners, TLS and send budgets; HTTP/2 for gRPC and HTTP/1.1 for REST below it."""
