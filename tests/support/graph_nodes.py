"""Nodes of graphs, run by the engine or one call at a time with packets that a test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

import trio
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from ovmstrio.core.service import ServableLookup
from ovmstrio.graphs.calculator import Calculator, DefinitionScope, InstanceContext, NodeContract, NodeResources
from ovmstrio.graphs.calculators import find_calculator
from ovmstrio.graphs.graph_config import GraphConfig, NodeConfig, Port, StreamRef
from ovmstrio.graphs.instance import GraphInstance, run_instance
from ovmstrio.graphs.packets import Packet
from ovmstrio.graphs.plan import LoadedNode, create_graph_plan
from ovmstrio.isolation.isolated_code import Isolation
from ovmstrio.isolation.thread_pool import WorkerThreads
from pyovms import Tensor

Feed = Iterable[tuple[int, Mapping[str, Any]]]
"""Values of inputs at timestamps, as a test sends them."""


def refs(*streams: str) -> tuple[StreamRef, ...]:
    """Read streams written as ``name``, ``TAG:name`` or ``TAG:index:name``."""
    made: list[StreamRef] = []
    for stream in streams:
        *place, name = stream.split(":")
        index = int(place[1]) if len(place) > 1 else 0 if place else len(made)
        made.append(StreamRef(Port(place[0] if place else "", index), name))
    return tuple(made)


_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {bool: _Field.TYPE_BOOL, str: _Field.TYPE_STRING}


def options(name: str, **values: Any) -> Any:
    """Make an options message ``mediapipe.<name>`` that has these fields: truth values, text, lists and maps of text.

    A field whose value is a type is there and not set.
    """
    file = descriptor_pb2.FileDescriptorProto(name="options.proto", package="mediapipe")
    message = file.message_type.add(name=name)
    for number, (key, value) in enumerate(values.items(), start=1):
        added = message.field.add(name=key, number=number, label=_Field.LABEL_OPTIONAL)
        if isinstance(value, dict):
            entry = message.nested_type.add(name=f"{key.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
            entry.field.add(name="value", number=2, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
            added.label, added.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
            added.type_name = f".mediapipe.{name}.{entry.name}"
        elif isinstance(value, list):
            added.label, added.type = _Field.LABEL_REPEATED, _Field.TYPE_STRING
        else:
            added.type = _TYPES[value if isinstance(value, type) else type(value)]
    pool = DescriptorPool()
    pool.Add(file)
    made = GetMessageClass(pool.FindMessageTypeByName(f"mediapipe.{name}"))
    return made(**{key: value for key, value in values.items() if not isinstance(value, type)})


class _Everything:
    def __init__(self, names: Sequence[str]) -> None:
        self.packets: dict[str, list[Packet]] = {name: [] for name in names}
        self._names = names

    def put(self, output: int, packet: Packet) -> bool:
        self.packets[self._names[output]].append(packet)
        return True

    async def wait_room(self) -> None:
        pass


def contract_of(node: NodeConfig) -> NodeContract:
    kind = find_calculator(node.calculator)
    assert kind is not None
    return kind.contract(node)


async def no_servables(name: str, version: str = "", /) -> NoReturn:
    raise AssertionError(name)


async def run_nodes(
    nodes: Sequence[NodeConfig],
    feed: Feed,
    *,
    side: Mapping[str, Any] | None = None,
    lease: ServableLookup = no_servables,
    inputs: Sequence[str] = (),
    steps_seen: list[dict[str, list[Packet]]] | None = None,
) -> dict[str, list[Packet]]:
    """Run nodes as one graph whose inputs are those named in the feed, and raise what the run failed with.

    Each step waits until the graph rests if ``steps_seen`` is given, which then gets the packets of each step.
    """
    steps = list(feed)
    made = [ref.name for node in nodes for ref in node.outputs]
    read = {ref.name for node in nodes for ref in node.inputs}
    names = dict.fromkeys([*inputs, *(name for _, values in steps for name in values)])
    outputs = [name for name in made if name not in read]
    config = GraphConfig("graph.pbtxt", refs(*names), refs(*outputs), nodes=tuple(nodes))
    scope = DefinitionScope("graph", Path(), WorkerThreads(), lease)
    loaded = []
    for node in nodes:
        kind = find_calculator(node.calculator)
        assert kind is not None
        loaded.append(LoadedNode(node, kind.contract(node), await kind.load(node, scope)))
    sink = _Everything(outputs)
    context = InstanceContext("graph", {}, "request", float("inf"))
    instance = GraphInstance(create_graph_plan(config, loaded), context, sink, side)
    try:
        async with run_instance(instance):
            for timestamp, values in steps:
                seen = {name: len(packets) for name, packets in sink.packets.items()}
                for name, value in values.items():
                    await instance.push(name, value, timestamp)
                if steps_seen is not None:
                    await instance.wait_idle()
                    fresh = {name: packets[seen[name] :] for name, packets in sink.packets.items()}
                    steps_seen.append({name: packets for name, packets in fresh.items() if packets})
            await instance.finish()
    except trio.BrokenResourceError:
        assert instance.failure is not None
    for each in reversed(loaded):
        await each.resources.aclose()
    if instance.failure is not None:
        raise instance.failure
    return sink.packets


LOOP = Port("LOOPBACK", 0)
_IN = Port("IN", 0)


@dataclass
class PythonNodeCall:
    node: NodeConfig
    instance: InstanceContext
    timestamp: int = 0
    inputs: Mapping[Port, Any] = field(default_factory=dict)
    side: Mapping[Port, Any] = field(default_factory=dict)
    emitted: list[tuple[Port, Any, int]] = field(default_factory=list)

    def emit(self, port: Port, value: Any, timestamp: int | None = None) -> None:
        self.emitted.append((port, value, self.timestamp if timestamp is None else timestamp))

    def emit_side(self, port: Port, value: Any) -> None:
        raise AssertionError((port, value))

    @property
    def texts(self) -> list[tuple[int, str, str]]:
        return [(time, each.name, bytes(each).decode()) for port, each, time in self.emitted if port != LOOP]

    @property
    def loopback(self) -> int | None:
        return next((time for port, value, time in self.emitted if port == LOOP and value is True), None)


def make_node(
    handler: str = "handler.py",
    inputs: Sequence[str] = ("IN:in",),
    outputs: Sequence[str] = ("OUT:out",),
    *,
    name: str = "node",
    generative: bool = False,
    side: Sequence[str] = ("PYTHON_NODE_RESOURCES:py",),
    **more: Any,
) -> NodeConfig:
    loop = ["LOOPBACK:loopback"] if generative else []
    chosen = more.pop("node_options", (options("PythonExecutorCalculatorOptions", handler_path=handler),))
    canonical = more.pop("canonical_name", name)
    return NodeConfig(
        name,
        canonical,
        "PythonExecutorCalculator",
        refs(*inputs, *loop),
        refs(*outputs, *loop),
        refs(*side),
        node_options=chosen,
        **more,
    )


class Nodes:
    """Loader of nodes with handlers in a folder; all nodes share a pool of threads."""

    def __init__(self, folder: Path, threads: WorkerThreads, scope: DefinitionScope) -> None:
        self.folder = folder
        self.threads = threads
        self.scope = scope
        self.loaded: list[NodeResources] = []

    def write(self, file: str, source: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))

    async def load(self, node: NodeConfig | None = None, source: str | None = None) -> Node:
        node = node or make_node()
        if source is not None:
            self.write(node.node_options[0].handler_path, "from pyovms import Tensor\n" + dedent(source).lstrip("\n"))
        kind = find_calculator(node.calculator)
        assert kind is not None
        kind.contract(node)
        resources = await kind.load(node, self.scope)
        self.loaded.append(resources)
        return Node(node, resources)


class Node:
    def __init__(self, config: NodeConfig, resources: NodeResources) -> None:
        self.config = config
        self.resources: Any = resources

    @asynccontextmanager
    async def opened(self, deadline: float = float("inf"), **parameters: Any) -> AsyncIterator[Opened]:
        instance = InstanceContext("graph", parameters, "request-1", deadline)
        calculator = await self.resources.open(PythonNodeCall(self.config, instance))
        opened = Opened(self.config, instance, calculator)
        try:
            yield opened
        finally:
            with trio.CancelScope(shield=True):
                await opened.close()

    async def run_once(self, text: bytes = b"", timestamp: int = 0) -> list[tuple[int, str, str]]:
        async with self.opened() as opened:
            return (await opened.run(text, timestamp)).texts


class Opened:
    def __init__(self, config: NodeConfig, instance: InstanceContext, calculator: Calculator) -> None:
        self.config = config
        self.instance = instance
        self.calculator: Any = calculator
        self._is_closed = False

    async def run(self, text: bytes = b"", timestamp: int = 0, **tensors: Any) -> PythonNodeCall:
        values = {Port(tag, 0): Tensor(tag.lower(), value) for tag, value in sorted(tensors.items())}
        return await self.process(timestamp, values or {_IN: Tensor("in", text)})

    async def again(self, timestamp: int) -> PythonNodeCall:
        return await self.process(timestamp, {LOOP: True})

    async def process(self, timestamp: int, values: Mapping[Port, Any]) -> PythonNodeCall:
        call = PythonNodeCall(self.config, self.instance, timestamp, values)
        await self.calculator.process(call)
        return call

    async def generate(self, text: bytes = b"", timestamp: int = 0) -> list[PythonNodeCall]:
        calls = [await self.run(text, timestamp)]
        while calls[-1].loopback is not None:
            calls.append(await self.again(calls[-1].loopback))
        return calls

    async def go_on(self, call: PythonNodeCall) -> None:
        while call.loopback is not None:
            call = await self.again(call.loopback)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self.calculator.close(PythonNodeCall(self.config, self.instance))


@asynccontextmanager
async def nodes(
    folder: Path, *, hide_errors: bool = False, isolation: Isolation | None = None, **settings: Any
) -> AsyncIterator[Nodes]:
    threads = WorkerThreads(**settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(threads.run)
        scope = DefinitionScope("graph", folder, threads, no_servables, hide_errors, isolation, nursery)
        made = Nodes(folder, threads, scope)
        try:
            yield made
        finally:
            with trio.CancelScope(shield=True):
                for each in reversed(made.loaded):
                    await each.aclose()
                await threads.aclose()
