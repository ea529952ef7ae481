"""Progress callbacks and time limits of downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

STALL_SECONDS: Final = 60.0
"""Default time that a storage may send nothing before a download fails."""


OnProgress = Callable[[], None]
"""Called from any thread when a piece of a file has been received."""
