"""A servable with streams made by code: every request says what it wants, and the test sees what became of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ovmstrio.core.datatypes import INVALID
from ovmstrio.core.errors import FailedPrecondition, GraphFailure, ServerError
from ovmstrio.core.generation import Task
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata, StreamProblem, StreamReply
from ovmstrio.core.servable import Servable
from ovmstrio.core.tensor import RawTensor, TensorSpec
from tests.support.pass_through import load_pass_through

GRAPH = "graph"
"""The name under which :func:`load_scripted` gives a :class:`ScriptedServable`; any other is a ``PassThrough``."""

FIRST_TIMESTAMP = 1_758_712_345_678_901

REPLIES_BUFFERED = 8


class ScriptedStream:
    """One open stream.

    A request is answered with ``parameters["replies"]`` replies (one, if it says nothing), each with the first input as
    an output.  ``problem`` answers it with a problem of that text, ``fail`` ends the stream with it, ``end`` ends it
    without an error, and with ``hold`` it is answered only after :meth:`ScriptedServable.release`.
    """

    def __init__(self, servable: ScriptedServable) -> None:
        self.servable = servable
        self.failure: Exception | None = None
        self.requests: list[InferRequest] = []
        self.made = 0
        self._told = trio.Event()
        self._send, self.replies = trio.open_memory_channel[StreamReply](REPLIES_BUFFERED)
        self._into, self._queue = trio.open_memory_channel["InferRequest"](0)

    async def send(self, request: InferRequest) -> None:
        self._told = trio.Event()
        await self._into.send(request)
        if "problem" in request.parameters:
            await self._told.wait()

    def end(self) -> None:
        self._into.close()

    async def run(self) -> None:
        with self._send, self._queue:
            try:
                async for request in self._queue:
                    self.requests.append(request)
                    if "end" in request.parameters:
                        return
                    await self._answer(request)
            except ServerError as error:
                self.failure = error

    async def _answer(self, request: InferRequest) -> None:
        asked = request.parameters
        if "hold" in asked:
            self.servable.holding.set()
            await self.servable.released.wait()
        for _ in range(int(asked.get("replies", 1))):
            if self.made == self.servable.pause_after:
                await self.servable.released.wait()
            await self._send.send(self._reply(request))
            self.made += 1
        self._told.set()
        if "fail" in asked:
            raise GraphFailure(str(asked["fail"]))

    def _reply(self, request: InferRequest) -> StreamReply:
        if "problem" in request.parameters:
            return StreamProblem(str(request.parameters["problem"]))
        outputs: list[Any] = [
            RawTensor(given.name, given.datatype, given.shape, raw or b"")
            for given, raw in zip(request.inputs, request.raw_inputs, strict=True)
        ]
        return InferResponse(GRAPH, "1", outputs, "", {"OVMS_MP_TIMESTAMP": FIRST_TIMESTAMP + self.made})


class ScriptedServable:
    """Streams that can be watched: how many are open, what they got, and how they ended.

    ``pause_after`` is the number of replies after which a stream waits for :meth:`release`.
    """

    def __init__(self) -> None:
        self.metadata = ServableMetadata(GRAPH, "OpenVINO", (_spec("x"), _spec("y")), (_spec("x"), _spec("y")))
        self.tasks: frozenset[Task] = frozenset()
        self.streams: list[ScriptedStream] = []
        self.open = 0
        self.pause_after = -1
        self.cancelled = trio.Event()
        self.closed = trio.Event()
        self.holding = trio.Event()
        self.released = trio.Event()

    def release(self) -> None:
        self.released.set()

    async def infer(self, request: InferRequest) -> InferResponse:
        async with self.open_stream(request) as stream:
            stream.end()
            replies = [reply async for reply in stream.replies]
        reply = replies[0]
        assert isinstance(reply, InferResponse)
        reply.id = request.id
        return reply

    @asynccontextmanager
    async def open_stream(self, first: InferRequest) -> AsyncIterator[ScriptedStream]:
        if "refuse" in first.parameters:
            raise FailedPrecondition(str(first.parameters["refuse"]))
        stream = ScriptedStream(self)
        self.streams.append(stream)
        self.open += 1
        problem: Exception | None = None
        left = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.run)
                try:
                    await stream.send(first)
                    yield stream
                except Exception as error:  # noqa: BLE001 - kept from becoming a group, and raised below
                    problem = error
                left = False
                nursery.cancel_scope.cancel()
        finally:
            self.open -= 1
            if left:
                self.cancelled.set()
            self.closed.set()
        failure = stream.failure or problem
        if failure is not None:
            raise failure

    async def aclose(self) -> None:
        """Hold nothing."""


def _spec(name: str) -> TensorSpec:
    return TensorSpec(name, INVALID, (), None)


async def load_scripted(spec: Any, version: int, directory: Path) -> Servable:
    """Load a servable for a registry: with streams under the name ``graph``, else a ``PassThrough``."""
    if spec.name == GRAPH:
        return ScriptedServable()
    return await load_pass_through(spec, version, directory)
