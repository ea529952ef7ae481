"""Readiness file: exists while the server is ready."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.util.regular_files import check_regular, open_regular

if TYPE_CHECKING:
    from ovmstrio.serving.data_plane import DataPlane

log = structlog.get_logger(__name__)

DEFAULT_FILE: Final = Path("/run/workspace/api_readiness.txt")
"""Default readiness file of handler projects."""


def default_file() -> Path | None:
    """Return the default readiness file if its directory is writable, else None."""
    return DEFAULT_FILE if os.access(DEFAULT_FILE.parent, os.W_OK | os.X_OK) else None


class ReadinessFile:
    """Readiness file at a path; does nothing with None."""

    def __init__(self, path: Path | None) -> None:
        # Absolute, as the working directory may change.
        self._path = None if path is None else path.absolute()
        self._remove()

    async def follow(self, plane: DataPlane) -> None:
        """Update the file until cancelled, then remove it."""
        try:
            while True:
                self.show(ready=plane.readiness().ready)
                await plane.wait_change()
        finally:
            self._remove()

    def show(self, *, ready: bool) -> None:
        """Create or remove the file."""
        if ready:
            self._create()
        else:
            self._remove()

    def _create(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            open_regular(self._path, os.O_WRONLY | os.O_CREAT).close()
        except OSError as error:
            log.warning("readiness file not written", path=str(self._path), reason=error.strerror)

    def _remove(self) -> None:
        if self._path is not None:
            # Devices such as /dev/null and FIFOs must not be removed.
            with suppress(OSError):
                check_regular(self._path)
                self._path.unlink(missing_ok=True)
