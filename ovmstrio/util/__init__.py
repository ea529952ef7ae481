"""Helpers that know nothing of models or protocols: truncation, redaction, backoff, container limits."""
