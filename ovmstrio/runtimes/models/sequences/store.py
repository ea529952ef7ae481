"""Sequences in a file, from the end of one server to the start of the next.

The file is consumed when it is read: after a server that ends without a drain there is none, because its clients have
gone further than the file would say.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.runtimes.models.sequences.encoding import DamagedStore, decode, encode, fill

if TYPE_CHECKING:
    from ovmstrio.runtimes.models.sequences.managers import SequenceManagers

__all__ = ["STORE_FILE", "restore_sequences", "save_sequences"]

log = structlog.get_logger(__name__)

STORE_FILE: Final = "sequences.bin"
_UNFINISHED: Final = "sequences.bin.new"


async def save_sequences(managers: SequenceManagers, directory: Path) -> None:
    """Write all sequences to a file, whole or not at all; no request may run any more.

    Raises: nothing; what goes wrong is logged.

    Cancellation: never; it is shielded, and takes as long as writing the file.
    """
    content = encode(managers, written_at=time.time())
    count = sum(map(len, managers))
    try:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(_write, directory, content)
    except OSError as error:
        log.error("sequences not saved", directory=str(directory), reason=str(error))  # noqa: TRY400 - told, no surprise
    else:
        log.info("sequences saved", directory=str(directory), sequences=count)


async def restore_sequences(managers: SequenceManagers, directory: Path) -> None:
    """Read the file and remove it; to be called before any model is loaded.

    Raises: nothing; a file that is damaged or cannot be read is logged, left where it is and passed over.

    Cancellation: at once; the file may be gone.
    """
    try:
        decoded = await trio.to_thread.run_sync(_consume, directory / STORE_FILE)
    except (OSError, DamagedStore) as error:
        log.error("sequences not restored", directory=str(directory), reason=str(error))  # noqa: TRY400 - told
        return
    if decoded is not None:
        count = fill(managers, *decoded, now=time.time())
        log.info("sequences restored", directory=str(directory), sequences=count)


def _write(directory: Path, content: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = directory / _UNFINISHED
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor has no path
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    unfinished.replace(directory / STORE_FILE)
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _consume(path: Path) -> tuple[dict[str, object], memoryview] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    decoded = decode(content)
    path.unlink()
    return decoded
