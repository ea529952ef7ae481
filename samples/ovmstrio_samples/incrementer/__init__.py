"""Three Python nodes that count on: the smallest packet graph."""
