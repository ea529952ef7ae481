"""Sample speech: English speech to text, thirty seconds at a time."""
