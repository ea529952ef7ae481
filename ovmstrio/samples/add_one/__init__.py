"""Sample add_one: the smallest model, which adds one to its input."""
