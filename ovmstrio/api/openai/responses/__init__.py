"""The Responses API: ``/responses``."""
