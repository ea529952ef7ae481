"""Servers of Ollama's API."""

from tests.service.protocols.openai.conftest import serving

__all__ = ["serving"]
