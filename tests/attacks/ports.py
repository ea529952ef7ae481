"""Where the server that is attacked listens, on loopback."""

from __future__ import annotations

from typing import NamedTuple


class Ports(NamedTuple):
    """The ports of a server."""

    grpc: int
    rest: int
