"""Local copy of a remote address in the download cache: changed files are downloaded, then appear all at once.

::

    <folder of the address>/lock            held by the process that downloads
                           /in_use          locked by the processes that serve the files
                           /partial/<hash>  interrupted downloads
                           /trees/<mark>/index.json, files/...
                           /current -> trees/<mark>/files

Everything here blocks, and runs in worker threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from ovmstrio.core.errors import StorageFailure
from ovmstrio.stores.address import Address, cache_root, is_hub_offline
from ovmstrio.stores.open_storage import OpenStorage, open_storage
from ovmstrio.stores.storage import StoredFile, check_file
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.progress import Progress, no_progress

ChooseVersions = Callable[[Iterable[int]], Iterable[int]]
"""Returns the versions of a model that are needed."""

_ATTEMPTS: Final = 5
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 60.0
_LOCK_PAUSE_SECONDS: Final = 0.1
_COMPANIONS: Final = {".xml": ".bin", ".pdmodel": ".pdiparams", ".pdiparams": ".pdmodel"}
"""Suffixes of the two files of a model, if the address names one of them."""
_UNUSED_SUFFIXES: Final = (
    ".safetensors",
    ".h5",
    ".msgpack",
    ".ot",
    ".pt",
    ".pth",
    ".ckpt",
    ".onnx",
    ".onnx_data",
    ".gguf",
)
"""Suffixes of other formats in a repository with OpenVINO's."""
_MODEL_SUFFIXES: Final = frozenset({".gguf", ".onnx", ".pb", ".pbtxt", ".pdmodel", ".tflite"})
_VERSION: Final = re.compile(r"0*[1-9][0-9]{0,17}")
_MAX_NAMES: Final = 8


class Mirror:
    """Local copy of an address.

    Args:
        address: the remote file or folder.
        open_store: opens the storage of the address.
    """

    def __init__(self, address: Address, open_store: OpenStorage = open_storage) -> None:
        self.address = address
        self._folder = address.folder
        self._current = self._folder / "current"
        self._open_store = open_store
        self._stopped = threading.Event()
        self._used: IO[bytes] | None = None

    @property
    def is_usable(self) -> bool:
        """True if there is a complete copy, perhaps an old one."""
        return self._current.exists()

    def stop(self) -> None:
        """End a running :meth:`update` of another thread at its next piece."""
        self._stopped.set()

    def keep(self) -> None:
        """Mark the copy as in use until :meth:`release`, so that no process removes it."""
        if self._used is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._used = (self._folder / "in_use").open("ab")
            fcntl.flock(self._used, fcntl.LOCK_SH)
            os.utime(self._folder / "in_use")

    def release(self) -> None:
        """Allow :func:`evict` to remove the copy."""
        if self._used is not None:
            self._used.close()
            self._used = None

    def update(self, choose: ChooseVersions = list, progress: Progress = no_progress) -> bool:
        """Download what has changed; return whether anything has.

        Of a folder of versions, ``choose`` selects the ones to download; others stay as long as the store has them.

        Raises:
            ConfigError: the package of the store is not installed.
            StorageFailure: the store or the disk failed; an earlier copy is unchanged.
        """
        if self.is_usable and self.address.family == "hf" and is_hub_offline():
            return False
        self._stopped.clear()
        name = str(self.address)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock(progress):
                store = self._open_store(self.address.text)
                try:
                    return self._update(store, choose, progress)
                finally:
                    store.close()
        except OSError as error:
            raise StorageFailure(f"{name} cannot be stored in {self._folder}: {error}", is_permanent=True) from error

    def _update(self, store: Any, choose: ChooseVersions, progress: Progress) -> bool:
        files = self._list(store, choose)
        mark = _mark(files)
        tree = self._folder / "trees" / mark
        if self._current.resolve() == tree / "files" and self._is_complete():
            return False
        unfinished = tree.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / "files").mkdir(parents=True)
        self._fill(store, files, unfinished / "files", progress)
        if _mark(self._list(store, choose)) != mark:
            raise StorageFailure(f"{self.address} has changed while it was downloaded")
        index = [[file.path, file.size, file.mark] for file in files]
        (unfinished / "index.json").write_text(json.dumps(index))
        shutil.rmtree(tree, ignore_errors=True)
        unfinished.rename(tree)
        link = self._folder / "current.new"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("trees", mark, "files"))
        previous = self._current.resolve().parent.name
        link.replace(self._current)
        # A load may be reading the previous tree.
        for old in (self._folder / "trees").iterdir():
            if old.name not in {mark, previous}:
                shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(self._folder / "partial", ignore_errors=True)
        return True

    def _list(self, store: Any, choose: ChooseVersions) -> Sequence[StoredFile]:
        """Return the files to have; those of an address of one file have its name as path."""
        text, name = self.address.text, self.address.file_name or self.address.archive_suffix
        listed: list[StoredFile] = _with_retries(partial(store.list_files, text), self._stopped)
        if name:
            listed = [replace(file, path=name) for file in listed if not file.path]
            suffix = Path(name).suffix
            if listed and suffix in _COMPANIONS:
                other, _, query = text.partition("?")
                place = other.removesuffix(suffix) + _COMPANIONS[suffix] + (f"?{query}" if query else "")
                found = _with_retries(partial(store.list_files, place), self._stopped)
                path = str(Path(name).with_suffix(_COMPANIONS[suffix]))
                listed += [replace(file, path=path) for file in found if not file.path]
        else:
            listed = [file for file in listed if file.path and not {"", ".", ".."} & set(file.path.split("/"))]
        if not listed:
            raise StorageFailure(f"nothing is stored at {self.address}", is_permanent=True)
        listed.sort(key=lambda file: file.path)
        is_repository = self.address.family == "hf" and not name
        chosen = _usable_files(self.address, listed) if is_repository else listed
        return _chosen_versions(chosen, self._present(), choose)

    def _present(self) -> dict[str, StoredFile]:
        """Return the files of the copy."""
        try:
            rows = json.loads((self._current.resolve().parent / "index.json").read_text())
            return {path: StoredFile(path, "", size, mark, 0.0) for path, size, mark in rows}
        except (OSError, ValueError):
            return {}

    def _is_complete(self) -> bool:
        """Return whether the copy still has the files that were downloaded; an archive was removed when unpacked."""
        kept = ((path, file) for path, file in self._present().items() if path != self.address.archive_suffix)
        return self.is_usable and all(_has_size(self._current / path, file.size) for path, file in kept)

    def _fill(self, store: Any, files: Sequence[StoredFile], folder: Path, progress: Progress) -> None:
        present, known = self._present(), self._current.resolve()
        missing: list[tuple[StoredFile, Path]] = []
        for file in files:
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            old, copy = present.get(file.path), known / file.path
            is_same = old is not None and (old.size, old.mark) == (file.size, file.mark)
            if not (is_same and _has_size(copy, file.size) and _reuse(copy, target)):
                missing.append((file, target))
        unfinished = self._folder / "partial"
        unfinished.mkdir(exist_ok=True)
        paths = [unfinished / _mark([file]) for file, _ in missing]
        done = sum(path.stat().st_size for path in paths if path.exists())
        total = sum(max(file.size, 0) for file, _ in missing)
        free = shutil.disk_usage(self._folder).free
        if total - done > free:
            message = f"{self.address} needs {_megabytes(total - done)}, and {_megabytes(free)} are free"
            raise StorageFailure(f"{message} in {self._folder}", is_permanent=True)

        def note(count: int) -> None:
            nonlocal done
            if self._stopped.is_set():
                raise StorageFailure("the download was abandoned", is_permanent=True)
            done += count
            progress(str(self.address), done, total or None)

        for (file, target), path in zip(missing, paths, strict=True):
            _with_retries(partial(_fetch, store, file, path, note), self._stopped, lambda: done)
            if file.path == self.address.archive_suffix:
                _unpack(path, file.path, folder)
            else:
                path.replace(target)

    @contextmanager
    def _lock(self, progress: Progress) -> Iterator[None]:
        """Wait until no other process downloads, and report its progress meanwhile."""
        seen = -1
        with (self._folder / "lock").open("ab") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    size = _size_of(self._folder / "partial")
                    if size != seen:
                        progress(str(self.address), size, None)
                    seen = size
                    if self._stopped.wait(_LOCK_PAUSE_SECONDS):
                        raise StorageFailure("the download was abandoned", is_permanent=True) from None
            yield

    def export(self, folder: Path) -> None:
        """Place the files of the copy in a folder, as links to the same data if the file system allows that.

        A new folder appears when it is complete; in an existing one, each file is replaced.

        Raises:
            StorageFailure: the folder cannot be written.
        """
        root = self._current.resolve()
        new = folder if folder.exists() else folder.with_name(f"{folder.name}.part")
        try:
            for source in root.rglob("*"):
                if source.is_dir():
                    continue
                target = new / source.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished = target.with_name(f"{target.name}.part")
                unfinished.unlink(missing_ok=True)
                if not _reuse(source.resolve(), unfinished):
                    shutil.copyfile(source, unfinished)
                unfinished.replace(target)
            new.replace(folder)
        except OSError as error:
            raise StorageFailure(f"{folder} cannot be written: {error}", is_permanent=True) from error


def evict(max_bytes: int) -> list[str]:
    """Remove copies that no process uses, the least recently used first, until the cache is small enough.

    Returns:
        The names of the removed folders.
    """
    folders = [path for path in _entries(cache_root()) if (path / "lock").exists()]
    sizes = {path: _size_of(path) for path in folders}
    removed = []
    for folder in sorted(folders, key=_last_use):
        if sum(sizes.values()) <= max_bytes:
            break
        with suppress(OSError), (folder / "in_use").open("ab") as used, (folder / "lock").open("ab") as lock:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
            del sizes[folder]
    return removed


def _last_use(folder: Path) -> float:
    try:
        return (folder / "in_use").stat().st_mtime
    except OSError:
        return 0.0


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _size_of(folder: Path) -> int:
    """Return the size of all files below a folder, each counted once; links count nothing."""
    sizes: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                stat = Path(root, name).lstat()
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _mark(files: Iterable[StoredFile]) -> str:
    """Return a short hash of the files' names and contents."""
    rows = sorted([file.path, file.size, file.mark, file.modified] for file in files)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _reuse(source: Path, target: Path) -> bool:
    """Link a file under a second name, without a copy of its data; return whether that worked."""
    try:
        if source.is_symlink():
            target.symlink_to(source.readlink())
            return target.exists()
        target.hardlink_to(source)
    except OSError:
        return False
    return True


def _has_size(path: Path, size: int) -> bool:
    try:
        return size in {-1, path.stat().st_size}
    except OSError:
        return False


def _chosen_versions(
    files: Sequence[StoredFile], present: Iterable[str], choose: ChooseVersions
) -> Sequence[StoredFile]:
    """Return the files of a folder without the versions that are neither chosen nor present."""
    tops = {file.path.partition("/")[0] for file in files if "/" in file.path}
    versions = {int(name): name for name in tops if _VERSION.fullmatch(name)}
    wanted = {versions[number] for number in choose(versions)} | {path.partition("/")[0] for path in present}
    left_out = set(versions.values()) - wanted
    return [file for file in files if file.path.partition("/")[0] not in left_out]


def _usable_files(address: Address, files: Sequence[StoredFile]) -> Sequence[StoredFile]:
    """Return the files of a repository of a hub that this server reads, without the same model in other formats.

    Raises:
        StorageFailure: none, or several models of which one must be named.
    """
    suffixes = {PurePosixPath(file.path).suffix for file in files}
    if ".xml" in suffixes:
        return [file for file in files if not _is_unused(file.path)]
    quantized = [file.path for file in files if file.path.endswith(".gguf")]
    if len(quantized) > 1:
        one = f"hf://{'@'.join(filter(None, address.hub[:2]))}/{quantized[0]}"
        names = ", ".join(quantized[:_MAX_NAMES]) + (", ..." if len(quantized) > _MAX_NAMES else "")
        raise StorageFailure(f"{address} has several models: {names}; name one, as in {one}", is_permanent=True)
    if not suffixes & _MODEL_SUFFIXES:
        hint = "convert it with optimum-cli, or choose a repository of https://huggingface.co/OpenVINO"
        found = ", ".join(sorted(suffixes - {""})[:_MAX_NAMES])
        message = f"{address} has no model that OpenVINO reads: expected .xml, .gguf or .onnx, got {found}; {hint}"
        raise StorageFailure(message, is_permanent=True)
    return files


def _is_unused(path: str) -> bool:
    name = PurePosixPath(path).name
    return path.endswith(_UNUSED_SUFFIXES) or (name.startswith("pytorch_model") and name.endswith(".bin"))


def _fetch(store: Any, file: StoredFile, path: Path, note: Callable[[int], None]) -> None:
    """Download a file and check it; a damaged one is downloaded once more."""
    for is_last in (False, True):
        store.fetch(file, path, note)
        try:
            check_file(path, file)
        except StorageFailure as error:
            # Neither this nor what a client has kept can be continued.
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            if is_last:
                raise StorageFailure(error.message, is_permanent=True) from error
        else:
            return


def _plain_member(member: tarfile.TarInfo, folder: Path) -> tarfile.TarInfo:
    """Return a member of an archive; raise ``TarError`` if it is neither a file nor a folder below ``folder``."""
    is_below = (folder / member.name).resolve().is_relative_to(folder.resolve())
    if not is_below or not (member.isreg() or member.isdir()):
        raise tarfile.TarError(f"{member.name} is not a file below the archive's folder")
    return member


# Of these, `zipfile` raises RuntimeError for an encrypted file, or one whose compression it does not know.
_ARCHIVE_ERRORS: Final = (
    shutil.ReadError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    RuntimeError,
)


def _unpack(archive: Path, suffix: str, folder: Path) -> None:
    """Unpack an archive; the files of its only folder, unless that is a version, are moved up."""
    try:
        if suffix == ".zip":
            shutil.unpack_archive(archive, folder, "zip")
        else:
            with tarfile.open(archive) as packed:
                if hasattr(tarfile, "data_filter"):
                    packed.extractall(folder, filter="data")
                else:  # Python before 3.11.4
                    packed.extractall(folder, [_plain_member(each, folder) for each in packed])  # noqa: S202 - checked
    except _ARCHIVE_ERRORS as error:
        raise StorageFailure(f"the archive is damaged: {error}", is_permanent=True) from error
    archive.unlink()
    entries = list(folder.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and not entries[0].name.isdecimal():
        inner = entries[0].rename(folder.with_name("inner"))
        folder.rmdir()
        inner.rename(folder)


def _with_retries(work: Callable[[], Any], stopped: threading.Event, progress: Callable[[], int] = lambda: 0) -> Any:
    """Run work of a store again after temporary failures, as late as the store asks for.

    Only failures without ``progress`` since the one before count.

    Raises:
        StorageFailure: the last failure.
    """
    backoff, left, seen = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS), _ATTEMPTS, progress()
    while True:
        try:
            return work()
        except StorageFailure as error:
            if progress() != seen:
                left, seen = _ATTEMPTS, progress()
                backoff.reset()
            left -= 1
            pause = max(backoff.seconds_after(), error.retry_after_seconds or 0)
            if error.is_permanent or not left or pause > _LONGEST_PAUSE_SECONDS or stopped.wait(pause):
                raise
