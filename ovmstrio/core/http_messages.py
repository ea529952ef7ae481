"""HTTP requests and responses, independent of servers and frameworks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, Self

from ovmstrio.core.connection import UNKNOWN_PEER, ClientAddress, Peer
from ovmstrio.util.buffers import PiecedMessage

Headers = tuple[tuple[str, str], ...]
"""Ordered lower-case names and values; names may repeat."""

AfterResponse = Callable[[], Any]
"""Runs after the response."""

STATUSES_WITHOUT_BODY: Final = frozenset({204, 304})
"""Statuses without a body."""

COMPLETE_BODY_TYPES: Final = (bytes, PiecedMessage)
"""Body types that are not streams; a tuple, as ``isinstance`` on a union is slower and runs for every response."""


class HttpRequest(NamedTuple):
    """One request with its complete body.

    Attributes:
        method: in upper case.
        path: below ``mount``, decoded except for encoded slashes; empty or starting with a slash.
        body: as sent; empty if there is a ``view``.
        view: a large body with an aligned end, for routes that accept one.
        target: request target as sent.
        mount: mount point; empty for the root.
        tasks: a nursery that ends with the response, for routes with tasks.
    """

    method: str
    path: str
    query: str = ""
    headers: Headers = ()
    body: bytes = b""
    peer: Peer = UNKNOWN_PEER
    target: str = ""
    mount: str = ""
    tasks: Any = None
    view: memoryview | None = None

    @property
    def client(self) -> ClientAddress:
        """Client address, derived from the peer and forwarding headers."""
        return self.peer.client(self.headers)

    def header(self, name: str) -> str | None:
        """Return the first header with a lower-case name, or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class ByteStream(Protocol):
    """A streamed body; the writer must always close it."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes:
        """Return the next chunk.

        Raises:
            StopAsyncIteration: end of the body.
            UserCodeError: user code raised, which has been logged; the body cannot be completed.
        """

    async def aclose(self) -> None:
        """Stop the producer; idempotent."""


@dataclass(slots=True)
class HttpAnswer:
    """One response; treated as immutable (a frozen dataclass takes twice as long to create).

    Attributes:
        headers: without those of the connection and of the body's length.
        body: complete body, buffers for scatter/gather, or a stream.
        after: callbacks that run in order when the body was sent or failed.
    """

    status: int
    headers: Headers = ()
    body: bytes | PiecedMessage | ByteStream = b""
    after: tuple[AfterResponse, ...] = ()

    @property
    def content(self) -> bytes:
        """The complete body; raises TypeError if the body is a stream."""
        if isinstance(self.body, bytes):
            return self.body
        if isinstance(self.body, PiecedMessage):
            return self.body.joined()
        raise TypeError("the body is a stream")

    @property
    def stream(self) -> ByteStream | None:
        """The streamed body; None for a complete one."""
        body = self.body
        return None if type(body) is bytes or isinstance(body, COMPLETE_BODY_TYPES) else body

    @property
    def size(self) -> int:
        """Size of the complete body in bytes; raises TypeError if the body is a stream."""
        if isinstance(self.body, COMPLETE_BODY_TYPES):
            return len(self.body)
        raise TypeError("the body is a stream")

    def followed_by(self, callback: AfterResponse) -> HttpAnswer:
        """Return the response with one more callback."""
        return replace(self, after=(*self.after, callback))

    def with_headers(self, headers: Headers) -> HttpAnswer:
        """Return the response with headers added or replaced."""
        names = {name for name, _ in headers}
        kept = tuple(line for line in self.headers if line[0] not in names)
        return replace(self, headers=(*kept, *headers))
