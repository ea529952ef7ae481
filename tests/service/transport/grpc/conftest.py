from __future__ import annotations

from tests.unit.transport.grpc.conftest import logs

__all__ = ["logs"]
