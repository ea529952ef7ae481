"""A request over HTTP as a Python node receives it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from pyovms.tensor import Tensor

__all__ = ["HttpPayload"]

_UNREAD: Final[Any] = object()


class HttpPayload(Tensor):
    """A whole request, which is what a stream tagged ``HTTP_REQUEST_PAYLOAD`` carries; read only.

    As a tensor it is the body: ``bytes(payload)``, shape ``[length]``, and for a datatype the type of its content.

    Attributes:
        method: in capitals.
        uri: what was asked for, with the query.
        headers: by names in lower case; what came several times is joined by commas.
        client: the host of the client; empty for a Unix socket, ``unknown`` without an address.
    """

    __slots__ = ("_parse", "_read", "client", "headers", "method", "uri")

    _parse: Callable[[bytes], Any]
    _read: Any
    method: str
    uri: str
    headers: Mapping[str, str]
    client: str

    @classmethod
    def _received(
        cls,
        name: str,
        body: Any,
        head: tuple[str, str, Mapping[str, str], str],
        parse: Callable[[bytes], Any] = json.loads,
    ) -> HttpPayload:
        """Create the payload of a request: its body, and method, URI, headers and client; ``parse`` reads JSON."""
        data = np.frombuffer(body, np.uint8)
        method, uri, headers, client = head
        payload = cls._restored(name, data, data.shape, headers.get("content-type", ""))
        payload.method, payload.uri, payload.client = method, uri, client
        payload.headers = MappingProxyType(dict(headers))
        payload._parse, payload._read = parse, _UNREAD  # noqa: SLF001 - of its own class
        return payload

    @property
    def _head(self) -> tuple[str, str, Mapping[str, str], str]:
        """What :meth:`_received` takes."""
        return self.method, self.uri, dict(self.headers), self.client

    @property
    def body(self) -> bytes:
        """The body."""
        return bytes(self)

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        if self._read is _UNREAD:
            try:
                self._read = self._parse(bytes(self))
            except ValueError:
                self._read = None
        return self._read
