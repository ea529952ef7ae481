"""TCP proxy on loopback that can cut, delay and half-close connections."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Final

import trio

_BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class Proxy:
    def __init__(self, port: int) -> None:
        self._to = port
        self._open: set[trio.SocketStream] = set()
        self.delay_seconds = 0.0

    async def run(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(self._pass, listeners)

    def cut(self) -> int:
        broken = [*self._open]
        for stream in broken:
            stream.socket.close()
        self._open.clear()
        return len(broken)

    async def half_close(self, random: Random) -> None:
        for stream in random.sample([*self._open], len(self._open)):
            with suppress(trio.BusyResourceError):
                with suppress(*_BROKEN):
                    await stream.send_eof()
                return

    async def _pass(self, client: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream("127.0.0.1", self._to)
        except OSError:
            await client.aclose()
            return
        ends = {client, server}
        self._open |= ends
        try:
            async with client, server, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, client, server)
                await self._pump(server, client)
        finally:
            self._open -= ends

    async def _pump(self, come: trio.SocketStream, go: trio.SocketStream) -> None:
        # It may be sending, or closed, when the other task half-closes it.
        with suppress(*_BROKEN, trio.BusyResourceError):
            async for data in come:
                if self.delay_seconds:
                    await trio.sleep(self.delay_seconds)
                await go.send_all(data)
            await go.send_eof()
