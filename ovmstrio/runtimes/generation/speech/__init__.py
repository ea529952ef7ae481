"""Models of speech: what asks the processes that they live in."""
