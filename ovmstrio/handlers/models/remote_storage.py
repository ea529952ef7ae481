"""Object stores through fsspec; imported only for URLs that need it.

fsspec runs asynchronous clients on one shared thread. Calls wait for that thread and cancel their operation there when
no data has arrived for some time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import fsspec
from fsspec.callbacks import Callback

from ovmstrio.core.errors import StorageFailure
from ovmstrio.handlers.models.version_index import STALL_SECONDS, OnProgress, StoredFile

_CONNECT_SECONDS: Final = 5.0
_ATTEMPTS: Final = 3
_LIST_STALLS: Final = 2
"""A listing shows no progress before its end, so its stall timeout is this many times longer."""
_MARKS: Final = ("ETag", "etag", "md5Hash", "content_md5", "version_id", "mtime")
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "created")


class _Progress(Callback):  # type: ignore[misc]  # fsspec has no types
    def __init__(self, on_progress: OnProgress | None = None) -> None:
        super().__init__()
        self.moved = time.monotonic()
        self._on_progress = on_progress

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self.moved = time.monotonic()
        if self._on_progress is not None:
            self._on_progress()


class FsspecStorage:
    """Object store of a URL scheme such as ``s3``.

    Credentials come from the usual sources of the store's client; without credentials S3 is accessed anonymously.

    Args:
        stall_seconds: maximum time without data, retries of the client included; doubled for listings.

    Raises:
        ImportError: a package for the scheme is not installed.
        ValueError: fsspec does not know the scheme.
    """

    def __init__(self, scheme: str, stall_seconds: float = STALL_SECONDS) -> None:
        options = _s3_options(stall_seconds) if scheme in {"s3", "s3a"} else {}
        self._stall_seconds = stall_seconds
        self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)

    def list_files(self, location: str) -> list[StoredFile]:
        """List all files below a folder; see :meth:`ModelStorage.list_files`."""
        root = self._files._strip_protocol(location).rstrip("/")  # noqa: SLF001 - fsspec has no public name for it
        try:
            found: Mapping[str, Mapping[str, Any]] = self._run(
                "find", _LIST_STALLS * self._stall_seconds, root, detail=True
            )
        except FileNotFoundError as error:
            # An object store lists a missing folder as empty, so the bucket is missing.
            raise StorageFailure(f"{location} cannot be listed: no such bucket") from error
        except StorageFailure as error:
            raise StorageFailure(f"{location} cannot be listed: {error}") from error
        except Exception as error:  # clients raise many types
            raise StorageFailure(f"{location} cannot be listed: {_reason(error)}") from error
        listed = ((path, path.removeprefix(root).removeprefix("/"), info) for path, info in found.items())
        return [
            _describe(path, relative, info)
            for path, relative, info in listed
            if info.get("type") != "directory" and _is_file_below(root, path, relative)
        ]

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        """Download a file; see :meth:`ModelStorage.fetch`."""
        try:
            self._run("get_file", self._stall_seconds, file.location, str(target), callback=_Progress(on_progress))
        except StorageFailure as error:
            raise StorageFailure(f"{file.location} cannot be downloaded: {error}") from error
        except Exception as error:  # as above
            raise StorageFailure(f"{file.location} cannot be downloaded: {_reason(error)}") from error

    def _run(self, name: str, seconds: float, *args: Any, **named: Any) -> Any:
        """Run a store operation; cancel it after ``seconds`` without progress.

        Raises:
            StorageFailure: no progress for ``seconds``.
        """
        if not self._files.async_impl:
            return getattr(self._files, name)(*args, **named)
        progress = named.get("callback") or _Progress()
        running = asyncio.run_coroutine_threadsafe(getattr(self._files, f"_{name}")(*args, **named), self._files.loop)
        while True:
            left = progress.moved + seconds - time.monotonic()
            try:
                return running.result(max(left, 0))
            except TimeoutError:
                if running.done():
                    raise
                if progress.moved + seconds <= time.monotonic():
                    running.cancel()
                    raise StorageFailure(f"no data for {seconds:g} s") from None

    def close(self) -> None:
        """Do nothing: fsspec closes connections when the store is garbage-collected."""


def _s3_options(stall_seconds: float) -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _minio_endpoint()
    limits = {
        "connect_timeout": min(_CONNECT_SECONDS, stall_seconds),
        # Half, to leave time for a retry.
        "read_timeout": stall_seconds / 2,
        "retries": {"max_attempts": _ATTEMPTS},
    }
    return {"endpoint_url": endpoint, "anon": not _has_aws_credentials(), "config_kwargs": limits}


def _minio_endpoint() -> str | None:
    """Return OVMS's ``S3_ENDPOINT`` as a URL; OVMS accepts it without a scheme."""
    endpoint = os.environ.get("S3_ENDPOINT")
    return endpoint if not endpoint or "://" in endpoint else f"http://{endpoint}"


def _has_aws_credentials() -> bool:
    import botocore.session  # noqa: PLC0415 - installed with s3fs only

    return botocore.session.get_session().get_credentials() is not None


def _is_file_below(root: str, path: str, relative: str) -> bool:
    """Return whether a key is a file below a folder: not a folder marker, and valid as a relative path."""
    if path == root:
        return True
    return path.startswith(f"{root}/") and not {"", ".", ".."} & set(relative.split("/"))


def _describe(path: str, relative: str, info: Mapping[str, Any]) -> StoredFile:
    mark = next((str(info[name]) for name in _MARKS if info.get(name)), "")
    modified = next((_seconds(info[name]) for name in _TIMES if info.get(name)), 0.0)
    return StoredFile(relative, path, int(info.get("size") or 0), mark, modified)


def _seconds(value: Any) -> float:
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    return float(value)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
