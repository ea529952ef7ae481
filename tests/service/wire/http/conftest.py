"""A REST front end over a real registry and data plane, served on loopback."""

from __future__ import annotations

from tests.service.api.rest.conftest import serving

__all__ = ["serving"]
