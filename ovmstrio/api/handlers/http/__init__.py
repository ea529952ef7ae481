"""Handlers over HTTP."""
