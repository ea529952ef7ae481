"""A small language model that streams its text."""
