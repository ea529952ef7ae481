"""Other ends of connections, for requests that no socket brings."""

from __future__ import annotations

import socket

from ovmstrio.core.peers import Peer, UnixSocket, socket_address


def peer_at(host: str) -> Peer:
    """Return the peer at an address; an empty host stands for a Unix socket."""
    return Peer(socket_address(socket.AF_INET, (host, 5000)) if host else UnixSocket())


LOCAL = peer_at("127.0.0.1")
REMOTE = peer_at("10.0.0.7")
