"""OpenAI endpoints ``/files``, and the folder with the files and batches of all callers.

::

    FOLDER/CALLER/files/ID.json, ID.data        document and content of a file
    FOLDER/CALLER/batches/ID.json, ...          see :mod:`ovmstrio.protocols.openai.batches`

Worker processes share the folder.  The modification time of a document is the time at which it expires.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import parse_qs
from uuid import uuid4

import orjson
import trio

from ovmstrio.core.errors import InvalidField, InvalidRequest, NotFound, StorageFailure
from ovmstrio.core.http_messages import HttpAnswer
from ovmstrio.protocols.openai.api import caller_key, page_of
from ovmstrio.protocols.openai.fields import shown
from ovmstrio.serving.ovms_errors import decompressed_body
from ovmstrio.transport.http.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self, TypeVar

    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.transport.http.router import Rule

    T = TypeVar("T")

# ----------------------------------------------------------------------
# Storage
# ----------------------------------------------------------------------

_OPEN: Final = "all"  # folder of callers without authentication
_ID: Final = re.compile(r"(file|batch)[-_][0-9a-f]{32}")
_FOLDERS: Final = {"file": "files", "batch": "batches"}
_PRIVATE: Final = 0o700
_CHUNK_BYTES: Final = 256 * 1024


class FileLimits(NamedTuple):
    """Folder of files and batches, and its limits: bytes, number of files and batches, and their age in seconds."""

    folder: Path
    max_bytes: float = 10 * 2**30
    max_files: int = 10_000
    max_seconds: float = 30 * 86_400.0


class FileStorage:
    """Files and batches of all callers in one folder; all methods block."""

    def __init__(self, limits: FileLimits) -> None:
        self.limits = limits

    def path(self, owner: str, identity: str, suffix: str, kind: str = "") -> Path:
        """Return the path of a file or batch of a caller; raise NotFound if the id is none, or of another kind."""
        match = _ID.fullmatch(identity)
        if match is None or (kind and match[1] != kind):
            raise NotFound(f"No such object: {shown(identity)}")
        return self.folder(owner, match[1]) / f"{identity}{suffix}"

    def folder(self, owner: str, kind: str) -> Path:
        """Return the folder of the files (kind ``file``) or batches (``batch``) of a caller."""
        name = sha256(owner.encode()).hexdigest()[:32] if owner else _OPEN
        return self.limits.folder / name / _FOLDERS[kind]

    def read(self, owner: str, identity: str, kind: str) -> dict[str, Any]:
        """Return the document of a file or batch; raise NotFound if there is none of the kind."""
        path = self.path(owner, identity, ".json", kind)
        try:
            document: dict[str, Any] = orjson.loads(path.read_bytes())
            if path.stat().st_mtime > time.time():
                return document
        except FileNotFoundError:
            pass
        raise NotFound(f"No such object: {shown(identity)}")

    def write(self, owner: str, document: Mapping[str, Any], expires: float) -> None:
        """Write a document, at once for all readers."""
        path = self.path(owner, document["id"], ".json")
        self._make_folder(path.parent)
        temporary = path.with_name(f"{path.name}.{uuid4().hex}")
        temporary.write_bytes(orjson.dumps(document))
        os.utime(temporary, (expires, expires))
        temporary.rename(path)

    def documents(self, owner: str, kind: str) -> list[dict[str, Any]]:
        """Return the documents of all files or batches of a caller, oldest first."""
        documents = []
        for path in self.folder(owner, kind).glob("*.json"):
            try:
                documents.append(self.read(owner, path.stem, kind))
            except NotFound:
                continue  # It has just been removed.
        return sorted(documents, key=lambda each: (each["created_at"], each["id"]))

    def add_file(self, owner: str, name: str, content: bytes | Path, *, seconds: float | None, purpose: str) -> Any:
        """Add a file with some content, or the content of a path that is moved; return its document.

        Raises:
            InvalidRequest: the storage is full.
        """
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        now = int(time.time())
        expires = now + min(seconds or self.limits.max_seconds, self.limits.max_seconds)
        document = {
            "id": f"file-{uuid4().hex}",
            "object": "file",
            "bytes": size,
            "created_at": now,
            "expires_at": int(expires),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        path = self.path(owner, str(document["id"]), ".data")
        with self._locked():
            self.check_room(size if isinstance(content, bytes) else 0)
            self._make_folder(path.parent)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                shutil.move(content, path)
            self.write(owner, document, expires)
        return document

    def check_room(self, size: int = 0, count: int = 1) -> None:
        """Remove what has expired; raise InvalidRequest if there is no room for ``count`` more files or batches.

        ``size`` is the number of their bytes.
        """
        now, used = time.time(), size
        for owner in os.scandir(self.limits.folder):
            for folder in _FOLDERS.values() if owner.is_dir() else ():
                used_here, count_here = _remove_expired(Path(owner.path, folder), now)
                used, count = used + used_here, count + count_here
        limits = self.limits
        for name, value, most in (("bytes", used, limits.max_bytes), ("files", count, limits.max_files)):
            if value > most:
                message = f"the file storage is full (--file-store-{name} {most:g}); delete files"
                raise InvalidRequest(message)

    def remove(self, owner: str, identity: str) -> None:
        """Remove a file."""
        self.read(owner, identity, "file")
        for suffix in (".json", ".data"):
            self.path(owner, identity, suffix).unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder, so that the limits hold for all workers."""
        self._make_folder(self.limits.folder)
        with (self.limits.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @staticmethod
    def _make_folder(folder: Path) -> None:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)


def _remove_expired(folder: Path, now: float) -> tuple[int, int]:
    """Remove expired objects of a folder; return the bytes and the number of the others."""
    used, count, names = 0, 0, set()
    if not folder.is_dir():
        return 0, 0
    entries = [(entry, entry.stat()) for entry in os.scandir(folder)]
    for entry, status in entries:
        if entry.name.endswith(".json") and status.st_mtime <= now:
            names.add(entry.name.removesuffix(".json"))
    for entry, status in entries:
        if entry.name.partition(".")[0] in names:
            Path(entry.path).unlink(missing_ok=True)
        else:
            used += status.st_size
            count += entry.name.endswith(".json")
    return used, count


async def in_storage(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a function of the storage in a thread.

    Raises:
        StorageFailure: the disk failed.
        ServerError: as the function.
    """
    try:
        return await trio.to_thread.run_sync(partial(function, *arguments, **options))
    except OSError as error:
        raise StorageFailure(f"the file storage failed: {error.strerror or error}") from error


def open_file(path: Path, mode: Literal["rb", "ab"]) -> IO[bytes]:
    """Open a file of the storage."""
    return path.open(mode)


class _FileStream:
    """Body with the content of an open file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await trio.to_thread.run_sync(self._file.read, _CHUNK_BYTES)
        if not data:
            raise StopAsyncIteration
        return data

    async def aclose(self) -> None:
        self._file.close()
        await trio.lowlevel.checkpoint()


# ----------------------------------------------------------------------
# Endpoint
# ----------------------------------------------------------------------

_PURPOSE: Final = "batch"
_MAX_PARTS: Final = 16
_MAX_NAME_CHARACTERS: Final = 255
_SECONDS: Final = "expires_after[seconds]"
_ANCHOR: Final = "expires_after[anchor]"
_FIELDS: Final = frozenset({"purpose", _SECONDS, _ANCHOR})


class _Upload(NamedTuple):
    name: str
    content: bytes
    seconds: float | None


def _read_upload(kind: str, body: bytes) -> _Upload:
    from ovmstrio.encoding.multipart import form_parts  # noqa: PLC0415 - loads a framework, only for forms

    file, fields = None, {}
    for part in form_parts(kind, body, limit=_MAX_PARTS):
        if part.filename is not None and part.name == "file":
            file = part
        elif part.name in _FIELDS:
            fields[part.name] = part.text
        else:
            raise InvalidField(f"Unknown parameter: {shown(part.name)}", field=part.name, code="unknown_parameter")
    if file is None:
        raise InvalidField("file is missing in request", field="file", code="missing_required_parameter")
    if fields.get("purpose") != _PURPOSE:
        raise InvalidField(f"purpose: expected {_PURPOSE}", field="purpose", got=shown(fields.get("purpose")))
    if fields.get(_ANCHOR, "created_at") != "created_at":
        raise InvalidField("expires_after.anchor: expected created_at", field="expires_after")
    seconds = fields.get(_SECONDS)
    if seconds is not None and (not re.fullmatch("[0-9]{1,9}", seconds) or not int(seconds)):
        raise InvalidField("expires_after.seconds: expected a positive integer", field="expires_after")
    return _Upload((file.filename or "")[-_MAX_NAME_CHARACTERS:], file.content, float(seconds) if seconds else None)


def file_rules(api: OpenAIApi, storage: FileStorage) -> list[Rule]:
    """Return the routes."""

    async def upload(request: HttpRequest) -> HttpAnswer:
        kind = request.header("content-type") or ""
        if not kind.lower().startswith("multipart/form-data"):
            raise InvalidField("expected a form with the part file", field="content-type", got=shown(kind))
        body = await decompressed_body(request, api.max_body_bytes)
        sent = await trio.to_thread.run_sync(_read_upload, kind, body)
        add = partial(storage.add_file, seconds=sent.seconds, purpose=_PURPOSE)
        return json_response(await in_storage(add, caller_key(), sent.name, sent.content))

    async def every(request: HttpRequest) -> HttpAnswer:
        found = await in_storage(storage.documents, caller_key(), "file")
        purpose = parse_qs(request.query).get("purpose")
        chosen = [each for each in found if purpose is None or each["purpose"] in purpose]
        return json_response(page_of(chosen, request.query, most=10_000))

    async def one(_: HttpRequest, file: str) -> HttpAnswer:
        return json_response(await in_storage(storage.read, caller_key(), file, "file"))

    async def delete(_: HttpRequest, file: str) -> HttpAnswer:
        await in_storage(storage.remove, caller_key(), file)
        return json_response({"id": file, "object": "file", "deleted": True})

    async def content(_: HttpRequest, file: str) -> HttpAnswer:
        owner = caller_key()
        await in_storage(storage.read, owner, file, "file")
        opened = await in_storage(open_file, storage.path(owner, file, ".data"), "rb")
        return HttpAnswer(200, (("content-type", "application/octet-stream"),), _FileStream(opened))

    return [
        *api.rules("/files", "POST", upload),
        *api.rules("/files", "GET", every),
        *api.rules("/files/<file>", "GET", one),
        *api.rules("/files/<file>", "DELETE", delete),
        *api.rules("/files/<file>/content", "GET", content),
    ]
