"""On-disk cache of compiled models, shared by all servers of a user.

::

    blobs/NAME                    a file of OpenVINO, complete or absent; the least recently used are removed
    entries/KEY.json              blobs of a model, with sizes and checksums
    run-*/KEY-*/HASH.blob         links to blobs, for one model of one process: OpenVINO's CACHE_DIR

Each process has its own links, so that none reads a file that another one is writing. They are removed with their
model.
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
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Final
from uuid import uuid4

import structlog
from platformdirs import user_cache_path

from ovmstrio.util.regular_files import open_regular, read_regular_text

log = structlog.get_logger(__name__)

_CHUNK_BYTES: Final = 2**22
_RUN: Final = "run-"
_LOCK: Final = "lock"
_NAME: Final = re.compile(r"\w{1,64}(\.blob)?", re.ASCII)


def default_cache_folder() -> Path:
    """Return the user's cache folder."""
    return user_cache_path("ovmstrio") / "compiled"


@contextmanager
def open_blob_cache(folder: Path, max_bytes: int) -> Iterator[BlobCache | None]:
    """Provide the cache within the block; None if ``folder`` is not usable or ``max_bytes`` is 0."""
    run = None if max_bytes <= 0 else _create_run_folder(folder)
    if run is None:
        yield None
        return
    place, lock = run
    try:
        yield BlobCache(folder, place, max_bytes)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _create_run_folder(folder: Path) -> tuple[Path, int] | None:
    try:
        for each in (folder, folder / "blobs", folder / "entries"):
            _make_private(each)
        _remove_stale_runs(folder)
        place = Path(mkdtemp(prefix=_RUN, dir=folder))
        return place, _lock(place, os.O_CREAT)
    except OSError as error:
        log.info("compile cache disabled", folder=str(folder), reason=str(error))
        return None


def _make_private(folder: Path) -> None:
    """Create a folder, or check that only this user can write there: cached code is executed."""
    if not folder.is_absolute():
        raise NotADirectoryError(f"{folder} is not an absolute path")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if {folder.lstat().st_uid, found.st_uid} != {os.geteuid()} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is owned or writable by other users than {os.geteuid()}")


def _lock(place: Path, flags: int = 0) -> int:
    descriptor = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_stale_runs(folder: Path) -> None:
    """Remove links of processes that crashed; a folder without a lock file is just being created."""
    for place in folder.glob(f"{_RUN}*"):
        with suppress(OSError):
            lock = _lock(place)
            shutil.rmtree(place, ignore_errors=True)
            os.close(lock)


class BlobCache:
    """Cache of one process, with its links in ``place``, which the caller removes; methods block for disk access."""

    def __init__(self, folder: Path, place: Path, max_bytes: int) -> None:
        self._blobs, self._entries = folder / "blobs", folder / "entries"
        self._place = place
        self._most_bytes = max_bytes

    def lend(self, key: str, min_bytes: int = 0) -> BlobCacheFolder | None:
        """Return a folder with the intact cached files of a model; None if it cannot be cached or exceeds the limit.

        ``key`` is a hash of the model, its settings and the machine; ``min_bytes`` is the minimum size of its file.
        """
        if min_bytes > self._most_bytes:
            return None
        try:
            place = Path(mkdtemp(prefix=f"{key}-", dir=self._place))
        except OSError as error:
            log.info("compile cache not readable", folder=str(self._place), reason=str(error))
            return None
        for name, (blob, size, check) in self._entry(key).items():
            with suppress(OSError):
                link = place / name
                os.link(self._blobs / blob, link)
                if (link.stat().st_size, _checksum(link)) != (size, check):
                    log.warning("cached model corrupt, recompiled", file=str(self._blobs / blob))
                    link.unlink()
                    (self._blobs / blob).unlink()
                else:
                    os.utime(link)
        return BlobCacheFolder(self, key, place)

    def keep(self, key: str, place: Path) -> None:
        """Store the files that OpenVINO has written for a model, and evict the least recently used beyond the limit.

        A file becomes visible once it is complete and on disk; of several processes that write the same one, one stores
        it.
        """
        try:
            known = self._existing_files(key)
            found = {path: path.stat().st_size for path in place.glob("*.blob") if path.name not in known}
            new = {path: (size, _checksum(path)) for path, size in found.items() if size <= self._most_bytes}
            for path in new:
                with open_regular(path) as file:
                    os.fsync(file.fileno())
            if new:
                with self._locked():
                    self._add(key, new)
                    self._remove_oldest()
        except OSError as error:
            log.info("compiled model not cached", folder=str(self._blobs), reason=str(error))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._entries.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _add(self, key: str, new: Mapping[Path, tuple[int, int]]) -> None:
        """Store files with their sizes and checksums, except those that another process has stored meanwhile."""
        entry = self._existing_files(key)
        for path, (size, check) in new.items():
            if path.name not in entry:
                entry[path.name] = (blob := uuid4().hex), size, check
                os.link(path, self._blobs / blob)
        with NamedTemporaryFile("w", dir=self._entries, delete=False, encoding="ascii") as made:
            json.dump(entry, made)
        Path(made.name).replace(self._entries / f"{key}.json")

    def _existing_files(self, key: str) -> dict[str, tuple[str, int, int]]:
        return {name: facts for name, facts in self._entry(key).items() if (self._blobs / facts[0]).exists()}

    def _entry(self, key: str) -> dict[str, tuple[str, int, int]]:
        """Return a model's files: OpenVINO's name to (blob, size, checksum)."""
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
class BlobCacheFolder:
    """Cache folder of one loaded model."""

    files: BlobCache
    key: str
    place: Path

    def keep(self) -> None:
        """Store the files written there. Blocks."""
        self.files.keep(self.key, self.place)

    def release(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.place, ignore_errors=True)


def _checksum(path: Path) -> int:
    check = 0
    with open_regular(path) as file:
        while piece := file.read(_CHUNK_BYTES):
            check = zlib.crc32(piece, check)
    return check


_MAPS: Final = Path("/proc/self/maps")
_MADV_DONTNEED: Final = 4
_FIELDS: Final = 6
_ELF: Final = b"\x7fELF"


def drop_page_cache(folder: Path) -> int:
    """Drop the pages of files below a folder that this process has mapped read-only; return their bytes (0 if unknown).

    OpenVINO maps a model's weights for its lifetime, but runs on reordered copies. Pages used again are read from the
    file, so this is safe at any time, in any thread. Libraries are kept: relocations in their pages are not in the
    files.
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
    """Yield address and size of read-only mappings of data files."""
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
    try:
        with open_regular(path) as file:
            return file.read(len(_ELF)) != _ELF
    except OSError:
        return False
