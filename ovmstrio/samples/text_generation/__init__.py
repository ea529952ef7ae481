"""Sample text_generation: a small language model in a Python node that streams its text."""
