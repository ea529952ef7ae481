"""Sample handler_primes: a custom gRPC service that streams prime numbers."""
