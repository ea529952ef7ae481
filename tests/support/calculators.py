"""Calculators for tests of the engine that record inputs, delay, or fail on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import trio

from ovmstrio.graphs.calculator import NodeContext, NodeContract, NodeFailure
from ovmstrio.graphs.graph_config import Port

LOOPBACK = Port("LOOPBACK", 0)

SPACING = 10
"""Between the timestamps that tests push, so that a node that repeats can fit its own in between."""


def in_port(index: int) -> Port:
    return Port("IN", index)


def out_port(index: int) -> Port:
    return Port("OUT", index)


def digest(*parts: object) -> int:
    return crc32(repr(parts).encode())


class Delivery(NamedTuple):
    timestamp: int
    inputs: tuple[tuple[Port, int], ...]


class Emission(NamedTuple):
    port: Port
    value: int
    timestamp: int


Rule = Callable[[Delivery], Sequence[Emission]]
"""Pure function from the inputs of a test node to its outputs; the model of the engine calls it, too."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Calculator that sends a digest of the inputs of its group on every output; sends nothing without inputs.

    ``groups`` has one entry an output.  Of every ``skip`` timestamps
    ``SPACING`` apart, output ``j`` leaves out number ``j``.
    """

    name: str
    groups: tuple[frozenset[Port], ...]
    skip: int = 0

    def __call__(self, delivery: Delivery) -> Sequence[Emission]:
        found = []
        for index, group in enumerate(self.groups):
            part = [(port, value) for port, value in delivery.inputs if port in group]
            skipped = self.skip and delivery.timestamp // SPACING % self.skip == index
            if part and not skipped:
                value = digest(self.name, index, *part)
                found.append(Emission(out_port(index), value, delivery.timestamp))
        return found


@dataclass(frozen=True, slots=True)
class Repeat:
    """Calculator that returns up to ``limit`` packets per input, one per run; ``LOOPBACK`` carries the rest."""

    limit: int

    def __call__(self, delivery: Delivery) -> Sequence[Emission]:
        given = dict(delivery.inputs)
        left = given.pop(LOOPBACK, None)
        if left is None:
            left = digest(*given.items()) % self.limit + 1
        if left == 0:
            return ()
        value = digest("repeat", delivery)
        later = delivery.timestamp + 1
        return Emission(out_port(0), value, delivery.timestamp), Emission(LOOPBACK, left - 1, later)


@dataclass
class Recorder:
    """The resources and the calculator of one node; runs take ``pauses`` checkpoints in turn."""

    rule: Rule
    pauses: Sequence[int] = ()
    fail_at: int | None = None
    contract: NodeContract = field(default_factory=NodeContract)
    deliveries: list[Delivery] = field(default_factory=list)
    opened: int = 0
    closed: int = 0
    freed: int = 0
    running: int = 0
    most_running: int = 0

    async def open(self, context: NodeContext) -> Recorder:
        self.opened += 1
        return self

    async def aclose(self) -> None:
        self.freed += 1

    async def process(self, context: NodeContext) -> None:
        delivery = Delivery(context.timestamp, _in_order(context.inputs))
        turn = len(self.deliveries)
        self.deliveries.append(delivery)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.pauses[turn % len(self.pauses)] if self.pauses else 0):
                await trio.lowlevel.checkpoint()
            if delivery.timestamp == self.fail_at:
                raise NodeFailure(f"set to fail at {delivery.timestamp}")
            for port, value, timestamp in self.rule(delivery):
                context.emit(port, value, timestamp)
        finally:
            self.running -= 1

    async def close(self, context: NodeContext) -> None:
        self.closed += 1


def _in_order(inputs: Mapping[Port, int]) -> tuple[tuple[Port, int], ...]:
    return tuple(inputs.items())
