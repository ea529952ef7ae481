from __future__ import annotations

from tests.service.protocols.kserve.rest.conftest import serving

__all__ = ["serving"]
