"""Typed clients of the protocols, for the command line."""
