from __future__ import annotations

import trio

from ovmstrio.wire.standstill import unsent_bytes


async def test_what_the_peer_has_not_taken_is_counted_until_the_socket_is_closed() -> None:
    """A look at a socket that somebody has just closed is no failure."""
    left, right = trio.socket.socketpair()
    stream = trio.SocketStream(left)
    with right:
        assert unsent_bytes(stream) == 0
        await stream.send_all(b"12345")
        assert unsent_bytes(stream) >= 5
        await stream.aclose()
        assert unsent_bytes(stream) == 0
