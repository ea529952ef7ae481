from __future__ import annotations

from tests.unit.ops.observing.conftest import log_files

__all__ = ["log_files"]
