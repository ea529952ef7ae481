"""What OpenVINO has compiled, kept in the user's folder for caches from one start to the next.

::

    blobs/NAME                    a file of OpenVINO's, whole or not there, the oldest ones go where there are too many
    entries/KEY.json              which of them a model has, and what tells that they are still what they were
    run-*/KEY-*/HASH.blob         links to them, for one model of one process: the folder that OpenVINO reads and writes

Several servers share the folder: each has links of its own, so that none reads what another one writes.  They go with
the model that they are for; what it has of a file that is not kept any more goes from the disk by then.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Final
from uuid import uuid4

import structlog
from platformdirs import user_cache_path

from ovmstrio.util.regular_files import open_regular, read_regular_text

__all__ = [
    "CompiledFiles",
    "LentFolder",
    "compiled_files",
    "compiled_folder",
    "keeping_compiled_files",
    "let_file_pages_go",
]

# ----------------------------------------------------------------------
# What OpenVINO has compiled, kept in the user's folder for caches from one start to the next
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_PIECE_BYTES: Final = 2**22
_RUN: Final = "run-"
_LOCK: Final = "lock"
_NAME: Final = re.compile(r"\w{1,64}(\.blob)?", re.ASCII)

_current: Final[ContextVar[CompiledFiles | None]] = ContextVar("files that OpenVINO has compiled", default=None)


def compiled_folder() -> Path:
    """Give the folder, which all servers of a user share."""
    return user_cache_path("ovmstrio") / "compiled"


def compiled_files() -> CompiledFiles | None:
    """Give those of the server that loads a model; None if it keeps none."""
    return _current.get()


@contextmanager
def keeping_compiled_files(folder: Path, most_bytes: int) -> Iterator[None]:
    """Keep what models compile to that tasks load which start in the block; nothing where the folder is of no use.

    Blocks for some milliseconds at either end.
    """
    own = None if most_bytes <= 0 else _make_own(folder)
    if own is None:
        yield
        return
    place, lock = own
    before = _current.set(CompiledFiles(folder, place, most_bytes))
    try:
        yield
    finally:
        _current.reset(before)
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _make_own(folder: Path) -> tuple[Path, int] | None:
    try:
        for each in (folder, folder / "blobs", folder / "entries"):
            _make_private(each)
        _remove_those_of_the_dead(folder)
        place = Path(mkdtemp(prefix=_RUN, dir=folder))
        return place, _lock(place, os.O_CREAT)
    except OSError as error:
        log.info("what is compiled is not kept", folder=str(folder), reason=str(error))
        return None


def _make_private(folder: Path) -> None:
    """Make a folder, or see that it is one in which nobody else has put a file: what is read there runs here."""
    if not folder.is_absolute():
        raise NotADirectoryError(f"{folder} has no absolute path")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if {folder.lstat().st_uid, found.st_uid} != {os.geteuid()} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others than the user {os.geteuid()} own {folder} or may write there")


def _lock(place: Path, flags: int = 0) -> int:
    descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_those_of_the_dead(folder: Path) -> None:
    """Remove links of processes that have ended without doing so; one without a lock is just being made."""
    for place in folder.glob(f"{_RUN}*"):
        with suppress(OSError):
            lock = _lock(place)
            shutil.rmtree(place, ignore_errors=True)
            os.close(lock)


class CompiledFiles:
    """The files of one process; all that it does blocks for as long as the disk takes.

    Args:
        folder: where they are kept.
        place: where this process has its links, which it removes itself.
        most_bytes: how many bytes of files are kept.
    """

    def __init__(self, folder: Path, place: Path, most_bytes: int) -> None:
        self._blobs, self._entries = folder / "blobs", folder / "entries"
        self._place = place
        self._most_bytes = most_bytes

    def lend(self, key: str, least_bytes: int = 0) -> LentFolder | None:
        """Give a folder for OpenVINO with what a model compiled to before, if that is whole; None if there is no room.

        What OpenVINO writes there is kept by :meth:`LentFolder.keep` alone.

        Args:
            key: what tells the model, its settings and where it runs.
            least_bytes: what a file of the model has at the least, so that none is written that cannot be kept.
        """
        if least_bytes > self._most_bytes:
            return None
        try:
            place = Path(mkdtemp(prefix=f"{key}-", dir=self._place))
        except OSError as error:
            log.info("what is compiled is not kept", folder=str(self._place), reason=str(error))
            return None
        for name, (blob, size, check) in self._entry(key).items():
            with suppress(OSError):
                link = place / name
                os.link(self._blobs / blob, link)
                if (link.stat().st_size, _checksum(link)) != (size, check):
                    log.warning("a kept model is damaged and is compiled again", file=str(self._blobs / blob))
                    link.unlink()
                    (self._blobs / blob).unlink()
                else:
                    os.utime(link)
        return LentFolder(self, key, place)

    def keep(self, key: str, place: Path) -> None:
        """Keep what OpenVINO has written for a model, and let go of what was used longest ago where that is too much.

        Others see a file once it is whole and on the disk; of several that write the same one, one keeps it.
        """
        try:
            known = self._whole_entry(key)
            found = {path: path.stat().st_size for path in place.glob("*.blob") if path.name not in known}
            new = {path: (size, _stored_checksum(path)) for path, size in found.items() if size <= self._most_bytes}
            if new:
                with self._alone():
                    self._add(key, new)
                    self._remove_oldest()
        except OSError as error:
            log.info("what is compiled is not kept", folder=str(self._blobs), reason=str(error))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have no other process change what is kept in the block."""
        descriptor = os.open(self._entries.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _add(self, key: str, new: Mapping[Path, tuple[int, int]]) -> None:
        """Keep files by their sizes and checksums, but for those that somebody else has kept meanwhile."""
        entry = self._whole_entry(key)
        for path, (size, check) in new.items():
            if path.name not in entry:
                entry[path.name] = (blob := uuid4().hex), size, check
                os.link(path, self._blobs / blob)
        with NamedTemporaryFile("w", dir=self._entries, delete=False, encoding="ascii") as made:
            json.dump(entry, made)
        Path(made.name).replace(self._entries / f"{key}.json")

    def _whole_entry(self, key: str) -> dict[str, tuple[str, int, int]]:
        """Read what is known of those of a model's files that are still there."""
        return {name: facts for name, facts in self._entry(key).items() if (self._blobs / facts[0]).exists()}

    def _entry(self, key: str) -> dict[str, tuple[str, int, int]]:
        """Read what is known of a model's files: by OpenVINO's name the own one, the size and the checksum."""
        try:
            found = json.loads(read_regular_text(self._entries / f"{key}.json", encoding="ascii"))
            entry = {name: (blob, size, check) for name, (blob, size, check) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        names = (name for own, (blob, _, _) in entry.items() for name in (own, blob))
        return entry if all(isinstance(name, str) and _NAME.fullmatch(name) for name in names) else {}

    def _remove_oldest(self) -> None:
        with os.scandir(self._blobs) as found:
            files = sorted((each.stat().st_mtime, each.stat().st_size, each.path) for each in found)
        room = self._most_bytes
        for _, size, path in reversed(files):
            if size > room:
                Path(path).unlink(missing_ok=True)
            else:
                room -= size
        with os.scandir(self._entries) as found:
            names = [Path(each.path) for each in found]
        for entry in names:
            blobs = [blob for blob, _, _ in self._entry(entry.stem).values()]
            if entry.suffix == ".json" and not any((self._blobs / blob).exists() for blob in blobs):
                entry.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LentFolder:
    """A folder for what one model compiles to, until the model is let go.

    Attributes:
        files: whose it is.
        key: what tells the model.
        place: where it is.
    """

    files: CompiledFiles
    key: str
    place: Path

    def keep(self) -> None:
        """Keep what has been written there; blocks for as long as the disk takes."""
        self.files.keep(self.key, self.place)

    def give_back(self) -> None:
        """Remove it, with what was not kept."""
        shutil.rmtree(self.place, ignore_errors=True)


def _stored_checksum(path: Path) -> int:
    """Give the checksum of a file that is on the disk by then."""
    check = _checksum(path)
    with open_regular(path) as file:
        os.fsync(file.fileno())
    return check


def _checksum(path: Path) -> int:
    check = 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            check = zlib.crc32(piece, check)
    return check


# ----------------------------------------------------------------------
# Pages of model files that are in memory for having been read while a model was compiled
# ----------------------------------------------------------------------

_MAPS: Final = Path("/proc/self/maps")
_MADV_DONTNEED: Final = 4
_FIELDS: Final = 6
_ELF: Final = b"\x7fELF"


def let_file_pages_go(folder: Path) -> int:
    """Let go of the pages of files below a folder that this process has mapped for reading; gives their bytes.

    OpenVINO maps the weights of a model for as long as it lives, and runs it on copies in an order of its own.  What is
    looked at once more comes back from the file, so that this is safe at any time, in any thread.

    Libraries stay: what the linker has written into them is not in their files, though nobody can write there any more.
    Gives 0 where the system does not tell what is mapped.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    return sum(
        size
        for begin, size in _mappings(f"{folder.resolve()}/")
        if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_DONTNEED) == 0
    )


def _mappings(prefix: str) -> Iterator[tuple[int, int]]:
    """Find where files of data are mapped that nobody can have changed in memory: the begins and the sizes."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(None, _FIELDS - 1)
        if len(fields) == _FIELDS and fields[-1].startswith(prefix) and "w" not in fields[1] and _is_data(fields[-1]):
            begin, end = (int(address, 16) for address in fields[0].split("-"))
            yield begin, end - begin


def _is_data(path: str) -> bool:
    """Tell whether a file is there and is no library."""
    try:
        with open_regular(path) as file:
            return file.read(len(_ELF)) != _ELF
    except OSError:
        return False
