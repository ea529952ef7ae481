"""A copy of a library that a process opens in its place, so that the file itself may be written again at any time.

The dynamic loader takes what it has open for whatever has the same path or inode, and a file that is overwritten
changes under the code that runs from it.  The copy lies beside the library, because ``$ORIGIN`` and what a library
finds beside itself go by the folder of what was opened, and has a name only for as long as it is being opened.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final
from uuid import uuid4

from ovmstrio.util.regular_files import open_regular

__all__ = ["private_copy", "remove_leftovers"]

_SUFFIX: Final = ".ovmstrio-copy"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_LONGEST_NAME: Final = 200
"""Of the part of a copy's name that is the library's; what a debugger or ``/proc/PID/maps`` shows of it."""


@contextmanager
def private_copy(path: Path) -> Iterator[Path]:
    """Give a copy of a file, in the same folder, that is deleted at the end of the block; blocking.

    Copies that processes left there when they crashed are deleted first.

    Raises:
        OSError: the file cannot be read, or its folder not be written.
    """
    remove_leftovers(path)
    with open_regular(path) as source:
        while True:
            copy = path.with_name(f".{path.name[:_LONGEST_NAME]}.{uuid4().hex}{_SUFFIX}")
            with os.fdopen(os.open(copy, _NEW, 0o600), "wb") as target:
                try:
                    if not _is_kept(target):
                        continue
                    shutil.copyfileobj(source, target)
                    target.flush()
                    yield copy
                finally:
                    copy.unlink(missing_ok=True)
            return


def remove_leftovers(path: Path) -> None:
    """Delete copies beside a file that no process is about to open; blocking.

    A process holds a lock on its copy, which the system takes from it when it dies.  What cannot be deleted stays.
    """
    with suppress(OSError):
        for leftover in path.resolve().parent.glob(f".*{_SUFFIX}"):
            with suppress(OSError), leftover.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink()


def _is_kept(target: IO[bytes]) -> bool:
    """Lock a new file, and tell whether nobody took it for a leftover before."""
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(target.fileno()).st_nlink > 0
