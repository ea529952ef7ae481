"""Connections on their way to another process."""

from __future__ import annotations

import socket

import trio

from ovmstrio.project_server.passing import DRAIN, ConnectionInbox, pass_connection


async def _connected() -> tuple[trio.SocketStream, trio.SocketStream]:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0] as listener:
        client = await trio.open_tcp_stream(*listener.socket.getsockname())
        return client, await listener.accept()


def _pair() -> tuple[trio.socket.SocketType, trio.socket.SocketType]:
    ours, theirs = socket.socketpair()
    return trio.socket.from_stdlib_socket(ours), trio.socket.from_stdlib_socket(theirs)


async def test_a_connection_works_where_it_was_given_to() -> None:
    """The giver may close its own end of it, and its end at the other place is told once."""
    ours, theirs = _pair()
    ended: list[str] = []
    inbox = ConnectionInbox(theirs, lambda: ended.append("one"))
    with ours, theirs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.run)
            client, accepted = await _connected()
            await pass_connection(ours, accepted.socket.fileno())
            await accepted.aclose()
            stream = await inbox.accept()
            await client.send_all(b"ping")
            assert await stream.receive_some() == b"ping"
            await stream.send_all(b"pong")
            assert await client.receive_some() == b"pong"
            assert not ended
            await stream.aclose()
            await stream.aclose()
            assert await client.receive_some() == b""
            await client.aclose()
            await ours.send(DRAIN)
        await inbox.aclose()
    assert ended == ["one"]


async def test_what_nobody_took_is_closed() -> None:
    """With the listener; its clients are told, not left waiting."""
    ours, theirs = _pair()
    inbox = ConnectionInbox(theirs, lambda: None)
    with ours, theirs:
        client, accepted = await _connected()
        await pass_connection(ours, accepted.socket.fileno())
        await accepted.aclose()
        await ours.send(DRAIN)
        await inbox.run()
        await inbox.aclose()
        assert await client.receive_some() == b""
        await client.aclose()


async def test_the_end_of_the_giver_is_the_end() -> None:
    """Whether it said so or not."""
    ours, theirs = _pair()
    with theirs:
        ours.close()
        with trio.fail_after(5):
            await ConnectionInbox(theirs, lambda: None).run()
