"""A picture file in, its text out: two models and three Python nodes."""
