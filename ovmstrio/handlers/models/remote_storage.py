"""Object stores, reached through fsspec; imported only when a URL needs it.

fsspec runs the clients of its stores on a thread of its own, which it starts at the first use and shares between all
of them; calls from here wait for that thread, and end what they began there when nothing has come for some time.
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
from ovmstrio.handlers.models.storage import STALL_SECONDS, Moved
from ovmstrio.handlers.models.version_index import StoredFile

__all__ = ["FsspecStorage"]

_CONNECT_SECONDS: Final = 5.0
_ATTEMPTS: Final = 3
_LIST_STALLS: Final = 2
"""A listing, of which nothing is seen before its end, gets so many times what a storage may give nothing for."""
_MARKS: Final = ("ETag", "etag", "md5Hash", "content_md5", "version_id", "mtime")
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "created")


class _Progress(Callback):  # type: ignore[misc]  # fsspec has no types
    """Knows when the last piece of a file has come.

    Args:
        told: is told, too.
    """

    def __init__(self, told: Moved | None = None) -> None:
        super().__init__()
        self.moved = time.monotonic()
        self._told = told

    def relative_update(self, inc: int = 1) -> None:
        """Note a piece."""
        super().relative_update(inc)
        self.moved = time.monotonic()
        if self._told is not None:
            self._told()


class FsspecStorage:
    """A store of the kind that a scheme stands for, such as ``s3``.

    Credentials come from where the store's own tools find them; with none, S3 is read anonymously.

    Args:
        scheme: the kind.
        stall_seconds: how long the store may give nothing, with all that its client tries again; a listing, of which
            nothing is seen before its end, gets twice as long.

    Raises:
        ImportError: fsspec needs a package for it.
        ValueError: fsspec knows no such scheme.
    """

    def __init__(self, scheme: str, stall_seconds: float = STALL_SECONDS) -> None:
        options = _s3_options(stall_seconds) if scheme in {"s3", "s3a"} else {}
        self._stall_seconds = stall_seconds
        self._files: Any = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)

    def list_files(self, location: str) -> list[StoredFile]:
        """List all files below a folder, as a ``ModelStorage``."""
        root = self._files._strip_protocol(location).rstrip("/")  # noqa: SLF001 - fsspec has no public name for it
        try:
            found: Mapping[str, Mapping[str, Any]] = self._run(
                "find", _LIST_STALLS * self._stall_seconds, root, detail=True
            )
        except FileNotFoundError as error:
            # Stores have no folders: one without files is listed as empty, and what is not found is the bucket.
            raise StorageFailure(f"{location} cannot be listed: there is no such place") from error
        except StorageFailure as error:
            raise StorageFailure(f"{location} cannot be listed: {error}") from error
        except Exception as error:  # stores raise whatever their clients do
            raise StorageFailure(f"{location} cannot be listed: {_reason(error)}") from error
        listed = ((path, path.removeprefix(root).removeprefix("/"), info) for path, info in found.items())
        return [
            _describe(path, relative, info)
            for path, relative, info in listed
            if info.get("type") != "directory" and _is_file_below(root, path, relative)
        ]

    def fetch(self, file: StoredFile, target: Path, moved: Moved) -> None:
        """Download a file, as a ``ModelStorage``."""
        try:
            self._run("get_file", self._stall_seconds, file.location, str(target), callback=_Progress(moved))
        except StorageFailure as error:
            raise StorageFailure(f"{file.location} cannot be downloaded: {error}") from error
        except Exception as error:  # as above
            raise StorageFailure(f"{file.location} cannot be downloaded: {_reason(error)}") from error

    def _run(self, name: str, seconds: float, *args: Any, **named: Any) -> Any:
        """Run an operation of the store's to its end, or until nothing has come for so many seconds.

        Raises:
            StorageFailure: it has given nothing for so long; it is cancelled.
            Exception: whatever it raises.
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
                    raise StorageFailure(f"nothing has come for {seconds:g} s") from None

    def close(self) -> None:
        """Do nothing: fsspec closes connections when their store is forgotten."""


def _s3_options(stall_seconds: float) -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or _minio_endpoint()
    limits = {
        "connect_timeout": min(_CONNECT_SECONDS, stall_seconds),
        # So that there is time for another try.
        "read_timeout": stall_seconds / 2,
        "retries": {"max_attempts": _ATTEMPTS},
    }
    return {"endpoint_url": endpoint, "anon": not _has_aws_credentials(), "config_kwargs": limits}


def _minio_endpoint() -> str | None:
    """Give the endpoint that OpenVINO Model Server is configured with, which may lack the scheme."""
    endpoint = os.environ.get("S3_ENDPOINT")
    return endpoint if not endpoint or "://" in endpoint else f"http://{endpoint}"


def _has_aws_credentials() -> bool:
    import botocore.session  # noqa: PLC0415 - the package is there only with the store's own

    return botocore.session.get_session().get_credentials() is not None


def _is_file_below(root: str, path: str, relative: str) -> bool:
    """Tell whether a key is a file in a folder, and no folder's marker; keys may be what no path can be."""
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
