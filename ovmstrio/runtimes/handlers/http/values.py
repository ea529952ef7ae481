"""Headers, query parameters and forms: mappings whose keys may have several values.

They have the names that handlers know from Starlette's classes, which are not needed for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from typing import BinaryIO, Final, Generic, TypeVar
from urllib.parse import parse_qsl, urlencode

import trio

from ovmstrio.core.errors import MalformedPayload, ServerError, UserCodeError
from ovmstrio.core.http import Headers, HttpAnswer
from ovmstrio.runtimes.handlers.http.responses import HTTPError

__all__ = [
    "FormData",
    "MultiDict",
    "QueryParams",
    "RequestHeaders",
    "UploadFile",
    "error_answer",
    "plain_error",
    "text_answer",
    "wants_json",
]

_V = TypeVar("_V")


class UploadFile:
    """A file of a form, in memory.

    ``file`` is for plain handlers; the ``async`` methods do the same for ``async def`` ones.

    Attributes:
        filename: as the client named it.
        file: its content, open for reading from the start.
        size: of the content in bytes.
        headers: of its part of the form.
    """

    def __init__(self, content: bytes, filename: str, headers: Headers = ()) -> None:
        self.filename = filename
        self.file: BinaryIO = BytesIO(content)
        self.size = len(content)
        self.headers = dict(headers)

    @property
    def content_type(self) -> str | None:
        """What the client says the content is."""
        return self.headers.get("content-type")

    def __repr__(self) -> str:
        return f"UploadFile(filename={self.filename!r}, size={self.size}, content_type={self.content_type!r})"

    async def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes, all by default.

        Cancellation: before anything is read.
        """
        await trio.lowlevel.checkpoint()
        return self.file.read(size)

    async def seek(self, offset: int) -> None:
        """Go to a place in the content.

        Cancellation: before that.
        """
        await trio.lowlevel.checkpoint()
        self.file.seek(offset)

    async def write(self, data: bytes) -> None:
        """Change the content at the place where it is read.

        Cancellation: before that.
        """
        await trio.lowlevel.checkpoint()
        self.file.write(data)

    async def close(self) -> None:
        """Forget the content.

        Cancellation: nowhere.
        """
        self.file.close()


class MultiDict(Mapping[str, _V], Generic[_V]):
    """A mapping that gives the last of several values; the others are in :meth:`getlist`.

    Args:
        pairs: keys and values in their order.
    """

    def __init__(self, pairs: Iterable[tuple[str, _V]] = ()) -> None:
        self._pairs = list(pairs)
        self._last = dict(self._pairs)

    def __getitem__(self, key: str) -> _V:
        return self._last[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pairs!r})"

    def getlist(self, key: str) -> list[_V]:
        """Give all values of a key."""
        return [value for each, value in self._pairs if each == key]

    def multi_items(self) -> list[tuple[str, _V]]:
        """Give all keys and values in their order."""
        return list(self._pairs)


class QueryParams(MultiDict[str]):
    """The parameters of a URL's query.

    Args:
        query: what follows the question mark, as it was sent.
    """

    def __init__(self, query: str = "") -> None:
        super().__init__(parse_qsl(query, keep_blank_values=True))

    def __str__(self) -> str:
        return urlencode(self._pairs)


class FormData(MultiDict[str | UploadFile]):
    """The fields of a form: text, or files that were uploaded."""

    async def close(self) -> None:
        """Close the files.

        Cancellation: nowhere, as they lie in memory.
        """
        for _, value in self._pairs:
            if isinstance(value, UploadFile):
                await value.close()


class RequestHeaders(Mapping[str, str]):
    """Headers of a request; names are compared without case, and are given in lower case.

    Args:
        pairs: names and values in their order.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = [(name.lower(), value) for name, value in pairs]
        self._first: dict[str, str] = {}
        for name, value in self._pairs:
            self._first.setdefault(name, value)

    def __getitem__(self, name: str) -> str:
        return self._first[name.lower()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._first

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def __repr__(self) -> str:
        return f"RequestHeaders({self._pairs!r})"

    def getlist(self, name: str) -> list[str]:
        """Give all values of a name."""
        wanted = name.lower()
        return [value for each, value in self._pairs if each == wanted]

    @property
    def raw(self) -> list[tuple[bytes, bytes]]:
        """All names and values as bytes."""
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._pairs]


_TEXT: Final = ("content-type", "text/plain; charset=utf-8")
_JSON: Final = ("content-type", "application/json")
_NO_BODY: Final = frozenset({204, 304})


def text_answer(status: int, text: str) -> HttpAnswer:
    """Make an answer of a line of text."""
    return HttpAnswer(status, (_TEXT,), text.encode("utf-8", "replace"))


def wants_json(accept: str | None) -> bool:
    """Tell whether a client wants errors in JSON: it says that it takes JSON, and not that it takes text."""
    return accept is not None and _JSON[1] in accept and "text/" not in accept


def plain_error(status: int, text: str, *, as_json: bool) -> HttpAnswer:
    """Make the answer of an error that the server itself tells."""
    if as_json:
        return HttpAnswer(status, (_JSON,), json.dumps({"error": text}).encode())
    return text_answer(status, text)


def error_answer(
    error: ServerError | HTTPError, status: int, *, shows_details: bool = False, as_json: bool = False
) -> HttpAnswer:
    """Make the answer to a request that failed.

    Args:
        error: what the handler, or the server before it, raised.
        status: what the front end's table has for errors of the server; an ``HTTPError`` brings its own.
        shows_details: whether the client may see what the handler's code raised, and where.
        as_json: whether the client wants it in JSON; what the handler chose to say is sent as it says it.
    """
    if isinstance(error, HTTPError):
        return _chosen(error)
    if isinstance(error, MalformedPayload) and error.is_json:
        as_json = True
    text = error.message
    if isinstance(error, UserCodeError) and shows_details and error.detail:
        text = f"{text}: {error.detail}"
    return plain_error(status, text, as_json=as_json)


def _chosen(error: HTTPError) -> HttpAnswer:
    extra = tuple((name.lower(), value) for name, value in error.headers.items())
    # Statuses below 200 and these have no body, whatever the handler says.
    if error.status_code in _NO_BODY:
        return HttpAnswer(error.status_code, extra)
    kind = () if any(name == "content-type" for name, _ in extra) else (_TEXT,)
    return HttpAnswer(error.status_code, (*kind, *extra), error.detail.encode("utf-8", "replace"))
