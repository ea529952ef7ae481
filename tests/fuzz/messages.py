"""Numbered messages to a server, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class Transport(Enum):
    GRPC = "grpc"  # The body is the data of a call with gRPC's prefixes.
    RAW_HTTP2 = "raw-http2"  # The body is everything that is sent on a connection to the gRPC port.
    HTTP = "http"  # The body has the length that its header states. Other requests follow on the connection.
    RAW_HTTP = "raw-http"  # The body is everything that is sent on a connection to the REST port.


@dataclass(frozen=True, slots=True)
class Message:
    number: int
    interface: str
    transport: Transport
    body: bytes
    path: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.number} ({self.interface}) {self.path} {list(self.headers)} {self.body[:300]!r}"


_INTERNAL_ERROR: Final = 2
_GRPC_FAULTS: Final = {"2": "UNKNOWN", "13": "INTERNAL", "15": "DATA_LOSS", "": "no status"}
_AS_GRPC_SAYS: Final = "request message is compressed, but grpc-encoding is"
"""Statuses that gRPC's rules call internal errors although the client caused them."""
_EXPLAINED: Final = {501, 503}
_VERSION_REFUSED: Final = 505


@dataclass(frozen=True, slots=True)
class Violation:
    numbers: range
    what: str

    def __str__(self) -> str:
        again = f"--first {self.numbers.start} --count {len(self.numbers)}"
        return f"{self.what}\n    again: just fuzz {again}"


@dataclass(slots=True)
class Outcome:
    kinds: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add_http(self, status: int, body: bytes) -> None:
        self.kinds.append(f"HTTP {status}")
        is_explained = status == _VERSION_REFUSED or (status in _EXPLAINED and body)
        if status >= 500 and not is_explained:
            self.faults.append(f"HTTP {status} {body[:300]!r}")

    def add_grpc(self, status: str, message: str) -> None:
        self.kinds.append(f"gRPC {status}")
        if status in _GRPC_FAULTS and not message.startswith(_AS_GRPC_SAYS):
            self.faults.append(f"gRPC {_GRPC_FAULTS[status]} {message[:300]}")

    def add_reset(self, what: str, code: int) -> None:
        self.kinds.append(f"{what} {code}")
        if code == _INTERNAL_ERROR:
            self.faults.append(f"{what} with INTERNAL_ERROR")

    def add_silence(self, what: str) -> None:
        self.kinds.append(what)
        self.faults.append(what)
