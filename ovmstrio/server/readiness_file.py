"""The file whose being there says that what is served can be called."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.util.regular_files import check_regular, open_regular

if TYPE_CHECKING:
    from ovmstrio.serving.data_plane import DataPlane

__all__ = ["USUAL_FILE", "ReadinessFile", "usual_file"]

log = structlog.get_logger(__name__)

USUAL_FILE: Final = Path("/run/workspace/api_readiness.txt")
"""Where those who run handler projects look for it."""


def usual_file() -> Path | None:
    """Give the usual file, if its folder is there and can be written to."""
    return USUAL_FILE if os.access(USUAL_FILE.parent, os.W_OK | os.X_OK) else None


class ReadinessFile:
    """Exists while the server is ready.

    Args:
        path: of the file; None for none.
    """

    def __init__(self, path: Path | None) -> None:
        # The working directory may change.
        self._path = None if path is None else path.absolute()
        self._remove()

    async def follow(self, plane: DataPlane) -> None:
        """Have the file say what the data plane says, until cancelled; it does not exist afterwards.

        Cancellation: at any checkpoint.
        """
        try:
            while True:
                self.show(ready=plane.readiness().ready)
                await plane.wait_change()
        finally:
            self._remove()

    def show(self, *, ready: bool) -> None:
        """Say whether the server is ready."""
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
            log.warning("the readiness file cannot be written", path=str(self._path), reason=error.strerror)

    def _remove(self) -> None:
        if self._path is not None:
            # A device such as /dev/null, or a FIFO, is not the server's to remove.
            with suppress(OSError):
                check_regular(self._path)
                self._path.unlink(missing_ok=True)
