"""Tensors in memory that a client shares with the server: regions that it registers, and calls that name them."""
