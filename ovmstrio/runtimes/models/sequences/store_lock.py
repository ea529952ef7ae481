"""The lock of a folder that one server at a time may keep its sequences in.

The kernel holds the lock for as long as the server lives, however it ends; what stands in the file is only for whoever
is refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import open_regular

__all__ = ["LOCK_FILE", "locked_folder"]

LOCK_FILE: Final = "sequences.lock"
_OPTION: Final = "--sequence_store"


@contextmanager
def locked_folder(folder: Path, configuration: str) -> Iterator[None]:
    """Keep other servers, of this process as well, out of a folder while the block lasts; makes the folder.

    Args:
        folder: of the sequences.
        configuration: what the server serves, for those that are refused.

    Raises:
        ConfigError: another server has it, which is named; or it cannot be written.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        problem = Problem("the folder cannot be written", path=_OPTION, found=f"{folder}: {error.strerror}")
        raise ConfigError([problem]) from None
    with TextIOWrapper(opened, encoding="utf-8") as file:
        descriptor = file.fileno()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError([_taken(folder, file.read())]) from None
        except OSError as error:
            problem = Problem("the folder cannot be locked", path=_OPTION, found=f"{folder}: {error.strerror}")
            raise ConfigError([problem]) from None
        file.truncate(0)
        json.dump(_owner(configuration), file)
        file.flush()
        try:
            yield
        finally:
            # It stays, as another server may wait for this very file; it says nothing any more.
            os.ftruncate(descriptor, 0)


def _owner(configuration: str) -> dict[str, Any]:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started, "configuration": configuration}


def _taken(folder: Path, written: str) -> Problem:
    try:
        owner = json.loads(written)
        found = f"process {owner['pid']} on {owner['host']}, since {owner['started']}, serving {owner['configuration']}"
    except (ValueError, LookupError, TypeError):
        found = "a server that has not said its name yet"
    return Problem(
        f"another server keeps its sequences in {folder}",
        path=_OPTION,
        expected="a folder that no other server has",
        found=found,
        suggestion="stop that server first, or give this one another folder; if it is gone already, a process that"
        f" it has started still holds {folder / LOCK_FILE}",
    )
