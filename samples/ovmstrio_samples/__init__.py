"""Small complete models: each folder holds what prepares a model and a client that knows the right answers."""

from __future__ import annotations

from ovmstrio_samples.embedded import prepare_repository

__all__ = ["prepare_repository"]
