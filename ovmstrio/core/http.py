"""An HTTP request and its answer as values, free of any server and framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, Self

from ovmstrio.core.connection import UNKNOWN_PEER, ClientAddress, Peer
from ovmstrio.util.buffers import PiecedMessage

__all__ = ["BODILESS", "WHOLE_BODIES", "ByteStream", "Callback", "Headers", "HttpAnswer", "HttpRequest"]

Headers = tuple[tuple[str, str], ...]
"""Names and values in their order; names may repeat, and are in lower case."""

Callback = Callable[[], Any]
"""Runs after the answer."""

BODILESS: Final = frozenset({204, 304})
"""Statuses whose answers have no body, whatever is given as one."""

WHOLE_BODIES: Final = (bytes, PiecedMessage)
"""The types of bodies that are no streams; every answer is asked for its type, which a union takes longer for."""


class HttpRequest(NamedTuple):
    """One request with its whole body.

    Attributes:
        method: in capitals.
        path: decoded, but for encoded slashes; below ``mount``, and then empty or beginning with a slash.
        query: what follows the question mark, as it was sent.
        headers: in their order.
        body: all of it, as it was sent; empty where there is a ``view``.
        view: of a large body, where the request's route takes one; its end is aligned in memory.
        peer: the other end of the connection; unknown unless the front end names it.
        target: what was asked for, as it was sent.
        mount: the name below which ``path`` is; empty for the root.
        tasks: a nursery that ends with the answer, where the request's route has tasks.
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
        """The address of the client, derived from the peer and the headers of proxies."""
        return self.peer.client(self.headers)

    def header(self, name: str) -> str | None:
        """Find the first header of a name, which is in lower case; None if there is none."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class ByteStream(Protocol):
    """A body that comes in pieces; whoever writes it must close it, however writing ends."""

    def __aiter__(self) -> Self:
        """Give itself."""
        ...

    async def __anext__(self) -> bytes:
        """Give the next piece.

        Raises:
            StopAsyncIteration: that was all.
            UserCodeError: the user code that makes it raised, which has been logged; the body cannot be finished.

        Cancellation: while there is none.
        """
        ...

    async def aclose(self) -> None:
        """Stop making more; may be called twice.

        Cancellation: shielded, for a bounded time.
        """
        ...


@dataclass(slots=True)
class HttpAnswer:
    """One answer; nobody changes one, though nothing keeps them from it, for that would take as long again to make.

    Attributes:
        status: of HTTP.
        headers: besides those of the connection and of the body's length.
        body: all of it, maybe to be sent from where its parts lie, or a stream of pieces.
        after: is called, one by one, when the body has been sent or could not be.
    """

    status: int
    headers: Headers = ()
    body: bytes | PiecedMessage | ByteStream = b""
    after: tuple[Callback, ...] = ()

    @property
    def content(self) -> bytes:
        """The body of an answer that is no stream.

        Raises:
            TypeError: it is one.
        """
        if isinstance(self.body, bytes):
            return self.body
        if isinstance(self.body, PiecedMessage):
            return self.body.joined()
        raise TypeError("the answer is a stream")

    @property
    def stream(self) -> ByteStream | None:
        """The body of an answer that is one, and None of any other."""
        body = self.body
        return None if type(body) is bytes or isinstance(body, WHOLE_BODIES) else body

    @property
    def size(self) -> int:
        """The bytes of the body of an answer that is no stream.

        Raises:
            TypeError: it is one.
        """
        if isinstance(self.body, WHOLE_BODIES):
            return len(self.body)
        raise TypeError("the answer is a stream")

    def followed_by(self, callback: Callback) -> HttpAnswer:
        """Give the same answer with one more callback."""
        return replace(self, after=(*self.after, callback))

    def with_headers(self, headers: Headers) -> HttpAnswer:
        """Give the same answer with headers that take the place of those of the same names."""
        names = {name for name, _ in headers}
        kept = tuple(line for line in self.headers if line[0] not in names)
        return replace(self, headers=(*kept, *headers))
