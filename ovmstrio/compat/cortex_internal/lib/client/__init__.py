"""Model clients for constructors of handlers; the server implements them."""
