"""Object stores through fsspec; imported only for URLs that need it.

fsspec runs asynchronous clients on one shared thread. Calls wait for that thread and cancel their operation there when
no data has arrived for some time.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import fsspec

from ovmstrio.core.errors import StorageFailure
from ovmstrio.stores.storage import BLOCK_BYTES, STALL_SECONDS, OnProgress, StoredFile, check_file, reason_of

_CONNECT_SECONDS: Final = 5.0
_ATTEMPTS: Final = 3
_LIST_STALLS: Final = 2
"""A listing shows no progress before its end, so its stall timeout is this many times longer."""
_MARKS: Final = ("ETag", "etag", "md5Hash", "content_md5", "version_id", "mtime")
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "created")


_MD5: Final = re.compile(r'"?([0-9a-f]{32})"?')


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
        self._is_s3 = scheme in {"s3", "s3a"}
        options = _s3_options(stall_seconds) if self._is_s3 else {}
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
            raise StorageFailure(f"{location} cannot be listed: {reason_of(error)}") from error
        listed = ((path, path.removeprefix(root).removeprefix("/"), info) for path, info in found.items())
        return [
            _describe(path, relative, info)
            for path, relative, info in listed
            if info.get("type") != "directory" and _is_file_below(root, path, relative)
        ]

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        """Download a file in pieces; see :meth:`ModelStorage.fetch`."""
        try:
            with target.open("ab") as copy:
                done = copy.tell()
                while done < file.size:
                    end = min(done + BLOCK_BYTES, file.size)
                    piece = self._run("cat_file", self._stall_seconds, file.location, start=done, end=end)
                    copy.write(piece)
                    done += len(piece)
                    on_progress(len(piece))
                    if not piece:
                        break
            check_file(target, file)
            self._check_etag(file, target)
        except StorageFailure as error:
            raise StorageFailure(f"{file.location} cannot be downloaded: {error}") from error
        except Exception as error:  # as above
            raise StorageFailure(f"{file.location} cannot be downloaded: {reason_of(error)}") from error

    def _check_etag(self, file: StoredFile, target: Path) -> None:
        """Check the ETag of a file in S3, which is its MD5 unless it was encrypted with a key or uploaded in parts."""
        found = _MD5.fullmatch(file.mark) if self._is_s3 else None
        if found is None:
            return
        try:
            check_file(target, replace(file, checksum=f"md5:{found[1]}"))
        except StorageFailure:
            bucket, _, key = file.location.partition("/")
            head = self._run("call_s3", self._stall_seconds, "head_object", Bucket=bucket, Key=key)
            if str(head.get("ServerSideEncryption", "AES256")) == "AES256" and "SSECustomerAlgorithm" not in head:
                raise

    def _run(self, name: str, seconds: float, *args: Any, **named: Any) -> Any:
        """Run a store operation; cancel it after ``seconds``.

        Raises:
            StorageFailure: the operation took longer.
        """
        if not self._files.async_impl:
            return getattr(self._files, name)(*args, **named)
        running = asyncio.run_coroutine_threadsafe(getattr(self._files, f"_{name}")(*args, **named), self._files.loop)
        try:
            return running.result(seconds)
        except TimeoutError:
            if running.done():
                raise
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
    return StoredFile(relative, path, int(info.get("size") or 0), mark, modified, _checksum(info))


def _checksum(info: Mapping[str, Any]) -> str:
    """Return the MD5 that Google Cloud Storage and Azure list."""
    settings = info.get("content_settings") or {}
    md5 = info.get("md5Hash") or (settings.get("content_md5") if isinstance(settings, Mapping) else None)
    if not md5:
        return ""
    return f"md5:{(base64.b64decode(md5) if isinstance(md5, str) else bytes(md5)).hex()}"


def _seconds(value: Any) -> float:
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    return float(value)
