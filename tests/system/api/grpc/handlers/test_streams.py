"""Tests of how streams stop, wait and end, with clients of grpcio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio

from tests.support.handler_grpc import ServedProject, front_end_of, opened, served
from tests.support.protos import FOUR_KINDS
from tests.support.waits import WAIT_SECONDS

ENDLESS = """
    import threading


    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2
            self.made = 0
            self.began = threading.Event()
            self.closed = threading.Event()

        def Alpha(self):
            pass

        def Beta(self, payload):
            try:
                for each in payload:
                    self.began.set()
            finally:
                self.closed.set()

        def Gamma(self, payload):
            try:
                while True:
                    self.made += 1
                    yield self.pb.Sample(number=self.made, data=payload.data)
            finally:
                self.closed.set()

        def Delta(self, payload):
            try:
                for each in payload:
                    self.began.set()
                    yield each
            finally:
                self.closed.set()
"""
ENDLESS_ASYNC = (
    ENDLESS.replace("def ", "async def ").replace("async def __init__", "def __init__").replace("for e", "async for e")
)


def proto(folder: Path) -> str:
    """Give the services in a package of the test's own."""
    return FOUR_KINDS.format(package=f"streams_{folder.name}")


async def closed(project: ServedProject) -> bool:
    """Wait until the handler's generator is closed, and tell whether that has happened."""
    return bool(await trio.to_thread.run_sync(project.handler.closed.wait, WAIT_SECONDS))


@pytest.mark.parametrize("handler", [ENDLESS, ENDLESS_ASYNC], ids=["plain", "async"])
async def test_a_client_that_has_enough_closes_the_generator(tmp_path: Path, handler: str) -> None:
    """An endless generator ends when its client cancels, and the handler serves the next call."""
    async with served(tmp_path, proto(tmp_path), handler) as project:

        def work(stub: Any) -> list[int]:
            replies = stub.Gamma(project.pb.Sample())
            first = [next(replies).number for _ in range(5)]
            replies.cancel()
            return first

        assert await project.ask(work) == [1, 2, 3, 4, 5]
        assert await closed(project)
        project.handler.closed.clear()
        project.handler.made = 0
        assert await project.ask(work) == [1, 2, 3, 4, 5]
        assert await closed(project)


@pytest.mark.parametrize("handler", [ENDLESS, ENDLESS_ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("method", ["Beta", "Delta"])
async def test_a_client_that_leaves_ends_a_wait_for_requests(tmp_path: Path, handler: str, method: str) -> None:
    """A handler that waits for a request which never comes is let go, and so is its thread."""
    async with served(tmp_path, proto(tmp_path), handler) as project:
        ended = threading.Event()

        def requests() -> Iterator[bytes]:
            yield b""
            ended.wait(WAIT_SECONDS)

        def work(_stub: Any) -> None:
            with grpc.insecure_channel(project.address) as channel:
                path = next(rpc.path for rpc in project.project.proto.rpcs if rpc.name == method)
                call = channel.stream_stream(path)(requests(), timeout=WAIT_SECONDS)
                call.add_done_callback(lambda _: ended.set())
                assert project.handler.began.wait(WAIT_SECONDS)
                call.cancel()

        await project.ask(work)
        assert await closed(project)


async def test_a_client_that_does_not_read_stops_the_generator(tmp_path: Path) -> None:
    """Replies that nobody reads fill the client's window and a few places more; then the generator waits."""
    async with served(tmp_path, proto(tmp_path), ENDLESS) as project:

        def work(stub: Any) -> None:
            replies = stub.Gamma(project.pb.Sample(data=bytes(100_000)))
            assert next(replies).number == 1
            replies.cancel()

        await project.ask(work)
        assert await closed(project)
        # The window of grpcio's clients grows to some megabytes at most.
        assert project.handler.made < 300


async def test_a_drain_lets_streams_end(tmp_path: Path) -> None:
    """A server that stops cancels what does not end in time, with UNAVAILABLE."""
    async with (
        opened(tmp_path, proto(tmp_path), ENDLESS) as project,
        front_end_of(project) as front_end,
        trio.open_nursery() as nursery,
    ):
        (address,) = await nursery.start(front_end.serve)
        served_project = ServedProject(project, address)
        began = trio.Event()
        token = trio.lowlevel.current_trio_token()
        codes: list[grpc.StatusCode] = []

        def work(stub: Any) -> None:
            replies = stub.Gamma(served_project.pb.Sample())
            next(replies)
            token.run_sync_soon(began.set)
            with pytest.raises(grpc.RpcError) as caught:
                for _ in replies:
                    pass
            codes.append(caught.value.code())

        nursery.start_soon(served_project.ask, work)
        await began.wait()
        await front_end.drain(0.1)
        assert await closed(served_project)
    assert codes == [grpc.StatusCode.UNAVAILABLE]
