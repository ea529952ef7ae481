"""Ollama's API: one module per endpoint, and what the endpoints share."""
