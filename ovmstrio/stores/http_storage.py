"""Web servers as a storage of single files; imported only for URLs that need it."""

from __future__ import annotations

import netrc
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Final

import httpx

from ovmstrio.core.errors import StorageFailure
from ovmstrio.stores.storage import OnProgress, StoredFile, reason_of, redact

_CONNECT_SECONDS: Final = 5.0
_PARTIAL: Final = 206
_RANGE_REFUSED: Final = 416
_MISSING: Final = frozenset({404, 410})
_HEAD_REFUSED: Final = frozenset({403, 405, 501})
_TEMPORARY: Final = frozenset({408, 425, 429})
_SERVER_ERROR: Final = 500


class HttpStorage:
    """Files of web servers, at ``http://`` and ``https://`` URLs.

    Credentials come from the URL or from ``~/.netrc``; proxies from the usual environment variables.

    Args:
        stall_seconds: maximum time without data.
    """

    def __init__(self, stall_seconds: float) -> None:
        try:
            auth = httpx.NetRCAuth()
        except (OSError, netrc.NetrcParseError):
            auth = None
        self._client = httpx.Client(
            auth=auth,
            follow_redirects=True,
            headers={"accept-encoding": "identity"},
            timeout=httpx.Timeout(stall_seconds, connect=min(_CONNECT_SECONDS, stall_seconds)),
        )

    def list_files(self, location: str) -> list[StoredFile]:
        """Return the file; see :meth:`ModelStorage.list_files`."""
        try:
            response = self._client.head(location)
            if response.status_code in _HEAD_REFUSED:
                # Signed URLs are often for GET only.
                with self._client.stream("GET", location) as response:
                    pass
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StorageFailure(f"{redact(location)} cannot be read: {reason_of(error)}") from error
        if response.status_code in _MISSING:
            return []
        _check_status(location, response)
        headers = response.headers
        mark = headers.get("etag") or headers.get("last-modified") or headers.get("content-length", "")
        try:
            modified = parsedate_to_datetime(headers.get("last-modified", "")).timestamp()
        except (TypeError, ValueError):
            modified = 0.0
        return [StoredFile("", location, int(headers.get("content-length", -1)), mark, modified)]

    def fetch(self, file: StoredFile, target: Path, on_progress: OnProgress) -> None:
        """Download the file, or what is missing of it; see :meth:`ModelStorage.fetch`."""
        try:
            with target.open("ab") as copy:
                done = copy.tell()
                if done and done == file.size:
                    return
                headers = {"range": f"bytes={done}-"} if done else {}
                if done and file.mark.startswith('"'):
                    headers["if-range"] = file.mark
                with self._client.stream("GET", file.location, headers=headers) as response:
                    if response.status_code == _RANGE_REFUSED:
                        _discard(copy, on_progress)
                        raise StorageFailure(f"{redact(file.location)} does not continue at byte {done}")
                    _check_status(file.location, response)
                    if response.status_code != _PARTIAL:
                        _discard(copy, on_progress)
                    elif not response.headers.get("content-range", "").startswith(f"bytes {done}-"):
                        _discard(copy, on_progress)
                        raise StorageFailure(f"{redact(file.location)} continued at another byte than {done}")
                    if (etag := response.headers.get("etag")) and file.mark[:1] in {'"', "W"} and etag != file.mark:
                        _discard(copy, on_progress)
                        raise StorageFailure(f"{redact(file.location)} has changed")
                    for piece in response.iter_raw():
                        copy.write(piece)
                        on_progress(len(piece))
        except httpx.HTTPError as error:
            raise StorageFailure(f"{redact(file.location)} cannot be downloaded: {reason_of(error)}") from error

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


def _discard(copy: IO[bytes], on_progress: OnProgress) -> None:
    on_progress(-copy.tell())
    copy.seek(0)
    copy.truncate()


def failure_of(location: str, status: int, retry_after: str | None) -> StorageFailure:
    """Return the failure of a response of a server."""
    is_temporary = status in _TEMPORARY or status >= _SERVER_ERROR
    return StorageFailure(
        f"{redact(location)} cannot be read: the server answers {status}",
        retry_after_seconds=_seconds(retry_after),
        is_permanent=not is_temporary,
    )


def _check_status(location: str, response: httpx.Response) -> None:
    if response.is_error:
        raise failure_of(location, response.status_code, response.headers.get("retry-after"))


def _seconds(retry_after: str | None) -> float | None:
    """Parse ``Retry-After``, a number of seconds or a date."""
    try:
        if retry_after is None or retry_after.strip().isdigit():
            return None if retry_after is None else float(retry_after)
        return max(parsedate_to_datetime(retry_after).timestamp() - time.time(), 0)
    except (TypeError, ValueError):
        return None
