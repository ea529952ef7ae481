"""The file whose being there says that a project can be called."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

__all__ = ["USUAL_FILE", "ReadinessFile"]

log = structlog.get_logger(__name__)

USUAL_FILE: Final = Path("/run/workspace/api_readiness.txt")


class ReadinessFile:
    """Exists while the project can be called.

    Args:
        path: of the file; None for the usual one, if its folder is there and can be written to.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None and os.access(USUAL_FILE.parent, os.W_OK | os.X_OK):
            path = USUAL_FILE
        # The working directory may change.
        self._path = None if path is None else path.absolute()
        self.is_ready = False
        self.remove()

    def create(self) -> None:
        """Say that the project can be called."""
        self.is_ready = True
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            log.warning("the readiness file cannot be written", path=str(self._path), reason=error.strerror)

    def remove(self) -> None:
        """Say that it cannot."""
        self.is_ready = False
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
