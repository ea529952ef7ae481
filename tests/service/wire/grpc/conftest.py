from __future__ import annotations

from tests.unit.wire.grpc.conftest import logs

__all__ = ["logs"]
