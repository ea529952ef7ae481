"""What is sent: one message for a number, always the same for the same number."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Transport(Enum):
    """How a message gets to the server."""

    GRPC = "grpc"
    """A call: its body is what DATA frames carry, gRPC's five bytes and all."""
    RAW_HTTP2 = "raw-http2"
    """The body is all that is sent on a connection to gRPC's port."""
    HTTP = "http"
    """A request whose body has the length that it says: others may follow on its connection."""
    RAW_HTTP = "raw-http"
    """The body is all that is sent on a connection to REST's port."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        number: makes the same message again.
        door: the protocol that it is for.
        path: of a call or a request, with its verb before it over HTTP.
        headers: beside those that every call or request has.
    """

    number: int
    door: str
    transport: Transport
    body: bytes
    path: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.number} ({self.door}) {self.path} {list(self.headers)} {self.body[:300]!r}"
