"""Python nodes without an engine: loaded as graphs load them, and run one call at a time by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import trio

from ovmstrio.runtimes.graphs.calculator import Calculator, DefinitionScope, InstanceContext, NodeResources
from ovmstrio.runtimes.graphs.calculators import find_kind
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.work.isolation.isolated_code import Isolation
from ovmstrio.work.threads.worker_threads import WorkerThreads
from pyovms import Tensor
from tests.support.graph_nodes import no_servables, options, refs

LOOP = Port("LOOPBACK", 0)
_IN = Port("IN", 0)


@dataclass
class PythonNodeCall:
    """One run of a node: what it is given and what it emits."""

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
    """Loads nodes whose handlers lie in a folder, and runs them; all of them share a pool of threads."""

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
        kind = find_kind(node.calculator)
        assert kind is not None
        kind.contract(node)
        resources = await kind.load(node, self.scope)
        self.loaded.append(resources)
        return Node(node, resources)


class Node:
    """A loaded node."""

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
    """A node of a running instance."""

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
    """Offer nodes; at the end all are closed, and then the threads."""
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
