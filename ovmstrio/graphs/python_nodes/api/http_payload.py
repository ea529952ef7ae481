"""HTTP request payload of Python nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ovmstrio.graphs.python_nodes.api.tensor import Tensor

__all__ = ["HttpPayload"]

_UNREAD: Final[Any] = object()


class HttpPayload(Tensor):
    """Complete HTTP request, the packet of streams tagged ``HTTP_REQUEST_PAYLOAD``; read-only.

    As a tensor it holds the body: ``bytes(payload)``, shape ``[length]``, and the content type as datatype.

    Attributes:
        method: HTTP method in upper case.
        uri: request target with query.
        headers: headers by lower-case name; repeated headers are joined by commas.
        client: host of the client; empty for a Unix socket, ``unknown`` without an address.
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
        """Create the payload from body and head; ``parse`` decodes JSON."""
        data = np.frombuffer(body, np.uint8)
        method, uri, headers, client = head
        payload = cls._restored(name, data, data.shape, headers.get("content-type", ""))
        payload.method, payload.uri, payload.client = method, uri, client
        payload.headers = MappingProxyType(dict(headers))
        payload._parse, payload._read = parse, _UNREAD  # noqa: SLF001 - same class
        return payload

    @property
    def _head(self) -> tuple[str, str, Mapping[str, str], str]:
        """Head argument of :meth:`_received`."""
        return self.method, self.uri, dict(self.headers), self.client

    @property
    def body(self) -> bytes:
        """Request body."""
        return bytes(self)

    @property
    def json(self) -> Any:
        """Body decoded as JSON; None if invalid."""
        if self._read is _UNREAD:
            try:
                self._read = self._parse(bytes(self))
            except ValueError:
                self._read = None
        return self._read
