"""Complete samples: each folder contains the preparation of a service and a client with known answers."""

from __future__ import annotations

from ovmstrio.samples.embedded import prepare_repository

__all__ = ["prepare_repository"]
