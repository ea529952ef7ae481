"""Files that a running server reads again when they change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.serving.fingerprints import paths_fingerprint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

log = structlog.get_logger(__name__)


class WatchedFiles:
    """Files that were read at the creation of this object; blocking.

    A failed read is repeated at each check: its reason, such as a missing permission, may end without a change of the
    files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._read = paths_fingerprint(files)
        self._failed = ""

    async def read_changes(self, read: Callable[[], Awaitable[object]], failure: str) -> bool:
        """Read the files if they have changed since they were read; return True if they were read.

        Args:
            read: reads the files; raises ServerError if they are invalid.
            failure: log event of an error, which is logged once until the files change again.
        """
        try:
            fingerprint = await trio.to_thread.run_sync(paths_fingerprint, self._files)
        except OSError:  # a lack of descriptors or memory
            return False
        if fingerprint == self._read:
            return False
        try:
            await read()
        except ServerError as error:
            if fingerprint != self._failed:
                log.error(failure, reason=error.message)  # noqa: TRY400 - an expected error
            self._failed = fingerprint
            return False
        self._read, self._failed = fingerprint, ""
        return True
