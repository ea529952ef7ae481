"""Helpers without knowledge of models and protocols: truncation, redaction, backoff, container limits."""
