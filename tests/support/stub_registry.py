"""Servables and loaders made by code, a registry that serves them, and a data plane of one service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import trio

from ovmstrio.config.specs import ModelSpec, ServableSpec
from ovmstrio.core.errors import FailedPrecondition, GraphFailure, InvalidRequest, ModelFailure, ServerError
from ovmstrio.core.generation import Task
from ovmstrio.core.request import (
    Buffer,
    InferInput,
    InferRequest,
    InferResponse,
    ServableMetadata,
    StreamProblem,
    StreamReply,
)
from ovmstrio.core.service import Servable, Service
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, INVALID, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.server.kinds import KINDS, Kinds, table_of
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.kind import Kind, LoadContext
from ovmstrio.serving.registry import Registry


class PassThrough:
    """Servable that returns its inputs; the request parameters ``fail`` and ``block`` make it raise or wait forever."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        inputs = (
            TensorSpec("text", BY_NAME["BYTES"], (ANY_SIZE,)),
            TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(1), Dim.fixed(10))),
        )
        self.metadata = ServableMetadata(spec.name, "OpenVINO", inputs, inputs)
        self.version = version
        self.requests: list[InferRequest] = []
        self.blocked = trio.Event()
        self.cancelled = trio.Event()

    async def infer(self, request: InferRequest) -> InferResponse:
        self.requests.append(request)
        if "fail" in request.parameters:
            raise ModelFailure(str(request.parameters["fail"]))
        if "block" in request.parameters:
            self.blocked.set()
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled.set()
        await trio.lowlevel.checkpoint()
        raw: list[Buffer | None] = [*request.raw_inputs] or [None] * len(request.inputs)
        outputs: list[Tensor | RawTensor] = [
            _tensor(tensor, buffer) for tensor, buffer in zip(request.inputs, raw, strict=True)
        ]
        return InferResponse(request.model_name, str(self.version), outputs, id=request.id, is_private=True)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def load_pass_through(spec: ModelSpec, version: int, directory: Path) -> PassThrough:
    await trio.lowlevel.checkpoint()
    return PassThrough(spec, version)


def _tensor(tensor: InferInput, buffer: Buffer | None) -> Tensor:
    datatype = BY_NAME[tensor.datatype]
    values: Any
    if buffer is None:
        assert tensor.contents is not None
        values = tensor.contents.values
    elif datatype.itemsize:
        values = np.frombuffer(buffer, datatype.numpy)
    else:
        values = _split(buffer)
    array = np.empty(len(values), datatype.numpy)
    array[:] = values
    if array.size != np.prod(tensor.shape):
        raise InvalidRequest(f"{array.size} elements do not fill {tensor.shape}")
    return Tensor(tensor.name, datatype, array.reshape(tensor.shape))


def _split(buffer: Buffer) -> list[bytes]:
    elements = []
    position = 0
    while position < len(buffer):
        (length,) = unpack_from("<I", buffer, position)
        elements.append(bytes(buffer[position + 4 : position + 4 + length]))
        position += 4 + length
    return elements


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
        self._answered = trio.Event()
        self._send, self.replies = trio.open_memory_channel[StreamReply](REPLIES_BUFFERED)
        self._into, self._queue = trio.open_memory_channel["InferRequest"](0)

    async def send(self, request: InferRequest) -> None:
        self._answered = trio.Event()
        await self._into.send(request)
        if "problem" in request.parameters:
            await self._answered.wait()

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
        self._answered.set()
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
    """Servable with recorded streams; after ``pause_after`` replies a stream waits for :meth:`release`."""

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
        pass


def _spec(name: str) -> TensorSpec:
    return TensorSpec(name, INVALID, (), None)


async def load_scripted(spec: Any, version: int, directory: Path) -> Servable:
    """Load a servable for a registry: with streams under the name ``graph``, else a ``PassThrough``."""
    if spec.name == GRAPH:
        return ScriptedServable()
    return await load_pass_through(spec, version, directory)


Load = Callable[[Any, int, Path], Awaitable[Any]]
"""Makes a servable of a spec, a version and its directory."""


class StubServable:
    """Servable that returns its name and version; ``misuse`` records calls after close and invalid closes."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        self.spec = spec
        self.version = version
        self.closed = 0
        self.running = 0
        self.misuse: list[str] = []
        self.metadata = ServableMetadata(spec.name, "Stub", (), ())

    async def infer(self, request: InferRequest) -> InferResponse:
        self.running += 1
        try:
            self._check(not self.closed, "called when closed")
            await trio.lowlevel.checkpoint()
            self._check(not self.closed, "closed during a call")
        finally:
            self.running -= 1
        return InferResponse(request.model_name, str(self.version), [])

    async def aclose(self) -> None:
        self.closed += 1
        self._check(self.closed == 1, "closed twice")
        self._check(not self.running, "closed under a call")
        await trio.lowlevel.checkpoint()

    def _check(self, fine: bool, misuse: str) -> None:
        if not fine:
            self.misuse.append(misuse)


class StubLoader:
    def __init__(self) -> None:
        self.opened: list[StubServable] = []
        self.attempts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.failing: dict[tuple[str, int], Exception] = {}
        self.begun: defaultdict[tuple[str, int], trio.Event] = defaultdict(trio.Event)
        self.cancelled: list[tuple[str, int]] = []
        self.at_once = 0
        self.most_at_once = 0
        self._attempted = trio.Event()
        self._gates: dict[tuple[str, int], trio.Event] = {}

    def hold(self, name: str, version: int) -> trio.Event:
        self.begun.pop((name, version), None)
        return self._gates.setdefault((name, version), trio.Event())

    def fail(self, name: str, version: int, error: Exception | None = None) -> None:
        self.failing[name, version] = error or ModelFailure("the stub is set to fail")

    def recover(self, name: str, version: int) -> None:
        self.failing.pop((name, version), None)

    async def wait_attempts(self, count: int) -> None:
        while sum(self.attempts.values()) < count:
            await self._attempted.wait()

    async def __call__(self, spec: ModelSpec, version: int, directory: Path) -> StubServable:
        key = (spec.name, version)
        self._begin(key)
        try:
            if key in self._gates:
                await self._gates[key].wait()
            await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            self.cancelled.append(key)
            raise
        finally:
            self.at_once -= 1
        if key in self.failing:
            raise self.failing[key]
        servable = StubServable(spec, version)
        self.opened.append(servable)
        return servable

    def _begin(self, key: tuple[str, int]) -> None:
        self.attempts[key] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun[key].set()
        self._attempted.set()
        self._attempted = trio.Event()

    @property
    def misuse(self) -> list[str]:
        return [misuse for servable in self.opened for misuse in servable.misuse]

    @property
    def open_versions(self) -> list[tuple[str, int]]:
        return sorted((servable.spec.name, servable.version) for servable in self.opened if not servable.closed)


def add_versions(base: Path, *versions: int) -> Path:
    for version in versions:
        (base / str(version)).mkdir(parents=True, exist_ok=True)
    return base


def kinds_loaded_by(load: Load) -> Kinds:

    def replaced(kind: Kind[Any]) -> Kind[Any]:
        async def load_(self: object, spec: Any, version: int, directory: Path, context: LoadContext) -> Any:
            del self, context
            return await load(spec, version, directory)

        adapted: Kind[Any] = type(f"Adapted{type(kind).__name__}", (type(kind),), {"load": load_})()
        return adapted

    return table_of(*map(replaced, KINDS.values()))


def registry_of(load: Load, **options: Any) -> Registry:
    return Registry(kinds_loaded_by(load), **options)


@asynccontextmanager
async def running(registry: Registry) -> AsyncIterator[Registry]:
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        yield registry
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_plane_of(
    spec: ServableSpec, service: Service, unready_reason: Callable[[], str] = str
) -> AsyncIterator[DataPlane]:
    """Serve a loaded service under a spec until the block ends; ``unready_reason`` is "" if it can be called."""

    async def load(spec: ServableSpec, version: int, directory: Path) -> Service:
        return service

    registry = registry_of(load, poll_seconds=0)
    plane = DataPlane(registry, unready_reason=unready_reason)
    async with running(registry):
        await registry.apply([spec])
        plane.begin_serving()
        yield plane
