"""Random graphs and packets for the engine and its reference model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from hypothesis import strategies as st

from ovmstrio.graphs.calculator import NodeContract
from ovmstrio.graphs.graph_config import GraphConfig, NodeConfig, PolicyConfig, Port, StreamRef
from ovmstrio.graphs.plan import GraphPlan, LoadedNode, create_graph_plan
from tests.support.calculators import LOOPBACK, SPACING, Delivery, Gather, Recorder, Repeat, in_port, out_port
from tests.support.graphs import load_graph_config
from tests.unit.graphs.reference import Feed, Handler, ModelNode, ModelRun

ANY_SPEED = ("Default", "SyncSet", "EarlyClose", "Barrier", "Immediate")
"""Policies whose runs are the same however fast the nodes are."""
AT_REST = (*ANY_SPEED, "FixedSize", "TimestampAlign")
"""Those that also look at what has come so far; the same if each packet waits until all nodes rest."""

_REPEATS = 4
_MOST_PACKETS = 12

Recorders = dict[str, Recorder]


@dataclass(frozen=True)
class Case:
    """Graph and its input packets.

    Attributes:
        in_flight: ``max_in_flight`` by node.
        pauses: by node, the checkpoints that its runs take.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[ModelNode, ...]
    feed: tuple[Feed, ...]
    max_queue_size: int = 100
    in_flight: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, tuple[int, ...]] = field(default_factory=dict)
    report_deadlock: bool = False


def model_of(case: Case) -> ModelRun:
    return ModelRun(case.inputs, case.outputs, case.nodes)


def make_recorders(case: Case) -> Recorders:
    return {
        node.name: Recorder(
            node.rule,
            case.pauses.get(node.name, ()),
            contract=NodeContract(propagates_bounds=node.propagates_bounds),
        )
        for node in case.nodes
    }


def plan_of(case: Case, recorders: Recorders) -> GraphPlan:
    nodes = [_config(node, case.in_flight.get(node.name, 1)) for node in case.nodes]
    config = GraphConfig(
        "graph.pbtxt",
        tuple(StreamRef(Port("", number), name) for number, name in enumerate(case.inputs)),
        tuple(StreamRef(Port("", number), name) for number, name in enumerate(case.outputs)),
        nodes=tuple(nodes),
        max_queue_size=case.max_queue_size,
        report_deadlock=case.report_deadlock,
    )
    loaded = [LoadedNode(node, recorders[node.name].contract, recorders[node.name]) for node in nodes]
    return create_graph_plan(config, loaded)


def views(case: Case, node: ModelNode, deliveries: Sequence[Delivery], *, at_rest: bool) -> list[list[Delivery]]:
    """Split what a node was given into the parts whose order is certain.

    Inputs that are not looked at together may overtake each other on the way through the graph.
    """
    if node.handler.name not in {"SyncSet", "Immediate"} or (at_rest and _reads_the_border(case, node)):
        return [list(deliveries)]
    if LOOPBACK in node.back_edges:
        return [list(deliveries)]
    parts = [
        [Delivery(timestamp, tuple(pair for pair in inputs if pair[0] in group)) for timestamp, inputs in deliveries]
        for group in _groups(node)
    ]
    return [[delivery for delivery in part if delivery.inputs] for part in parts]


def _reads_the_border(case: Case, node: ModelNode) -> bool:
    streams = [stream for _, stream in node.inputs]
    return len(set(streams)) == len(streams) and set(streams) <= set(case.inputs)


def _groups(node: ModelNode) -> list[frozenset[Port]]:
    ports = [port for port, _ in node.inputs]
    if node.handler.name == "Immediate":
        return [frozenset([port]) for port in ports]
    declared = [frozenset(each) for each in node.handler.sets]
    rest = frozenset(ports).difference(*declared)
    return [*declared, rest] if rest else declared


def _config(node: ModelNode, in_flight: int) -> NodeConfig:
    return NodeConfig(
        node.name,
        node.name,
        "TestCalculator",
        tuple(StreamRef(port, stream) for port, stream in node.inputs),
        tuple(StreamRef(port, stream) for port, stream in node.outputs),
        policy=_policy(node.handler),
        back_edges=node.back_edges,
        max_in_flight=in_flight,
    )


def policy_config(handler: str, options: str = "") -> PolicyConfig:
    """Read an input stream handler as a file has it; ``options`` is the text of its own message."""
    extension = f"options {{ [mediapipe.{handler}InputStreamHandlerOptions.ext] {{ {options} }} }}" if options else ""
    text = f"""
        node {{
          calculator: "PassThroughCalculator" input_stream: "A:a" output_stream: "A:b"
          input_stream_handler {{ input_stream_handler: "{handler}InputStreamHandler" {extension} }}
        }}
    """
    return load_graph_config(text, "graph.pbtxt").nodes[0].policy


@cache
def _policy(handler: Handler) -> PolicyConfig:
    match handler.name:
        case "SyncSet":
            tags = [" ".join(f'tag_index: "{port.tag}:{port.index}"' for port in ports) for ports in handler.sets]
            options = " ".join(f"sync_set {{ {each} }}" for each in tags)
        case "FixedSize":
            minimum = str(handler.fixed_min_size).lower()
            sizes = f"trigger_queue_size: {handler.trigger} target_queue_size: {handler.target}"
            options = f"{sizes} fixed_min_size: {minimum}"
        case "TimestampAlign":
            options = f'timestamp_base_tag_index: "{handler.base.tag}:{handler.base.index}"'
        case _:
            options = ""
    return policy_config(handler.name, options)


# Drawing


@st.composite
def cases(draw: st.DrawFn, handlers: Sequence[str] = ANY_SPEED, *, loops: bool = False, bounds: bool = False) -> Case:
    """Draw a graph whose results are certain, and packets for it; with ``bounds`` most nodes tell what they skip."""
    inputs = tuple(f"in{number}" for number in range(draw(st.integers(1, 3))))
    builder = _Builder(draw, inputs, handlers, with_bounds=bounds)
    for number in range(draw(st.integers(3, 6) if bounds else st.integers(1, 5))):
        builder.add_gather(f"node{number}")
    if loops:
        builder.add_repeat("repeat")
        for number in range(draw(st.integers(0, 2))):
            builder.add_gather(f"after{number}")
    outputs = draw(st.lists(st.sampled_from(builder.streams), min_size=1, max_size=3, unique=True))
    names = [node.name for node in builder.nodes]
    return Case(
        inputs,
        tuple(outputs),
        tuple(builder.nodes),
        draw(_feeds(inputs)),
        draw(st.sampled_from([100, 1, 2, 3, -1])),
        {name: draw(st.sampled_from([1, 1, 2, 3])) for name in names if name != "repeat"},
        {name: tuple(draw(st.lists(st.integers(0, 4), max_size=4))) for name in names},
    )


@st.composite
def _feeds(draw: st.DrawFn, inputs: Sequence[str]) -> tuple[Feed, ...]:
    """Draw packets that ascend on each input; inputs may lag behind each other."""
    moves = draw(st.lists(st.tuples(st.sampled_from(inputs), st.integers(1, 3)), max_size=_MOST_PACKETS))
    times = dict.fromkeys(inputs, 0)
    feed = []
    for number, (stream, step) in enumerate(moves):
        times[stream] += step * SPACING
        feed.append(Feed(stream, times[stream], number))
    return tuple(feed)


class _Builder:
    def __init__(self, draw: st.DrawFn, inputs: Sequence[str], handlers: Sequence[str], *, with_bounds: bool) -> None:
        self.draw = draw
        self.inputs = list(inputs)
        self.streams = list(inputs)
        self.nodes: list[ModelNode] = []
        self._handlers = handlers
        # Bounds that travel ahead of the end of a stream make it uncertain what an early close still sees.
        self._with_bounds = with_bounds

    def add_gather(self, name: str) -> None:
        handler_name = self.draw(st.sampled_from(self._choices()))
        sources = self._sources(handler_name)
        ports = [in_port(number) for number in range(len(sources))]
        handler = self._handler(handler_name, ports)
        draft = ModelNode(name, tuple(zip(ports, sources, strict=True)), (), lambda _: (), handler)
        groups = _groups(draft) if handler_name in {"SyncSet", "Immediate"} else [frozenset(ports)] * self._count(2)
        outputs = tuple((out_port(number), f"{name}_{number}") for number in range(len(groups)))
        rule = Gather(name, tuple(groups), self.draw(st.sampled_from([0, 0, 2, 3])))
        bounds = self._with_bounds and handler_name == "Default" and self.draw(st.sampled_from([True, True, False]))
        self._add(ModelNode(name, draft.inputs, outputs, rule, handler, propagates_bounds=bounds))

    def add_repeat(self, name: str) -> None:
        sources = self._sources("SyncSet")
        ports = [in_port(number) for number in range(len(sources))]
        inputs = (*zip(ports, sources, strict=True), (LOOPBACK, f"{name}_loop"))
        outputs = ((LOOPBACK, f"{name}_loop"), (out_port(0), f"{name}_0"))
        handler = Handler("SyncSet", sets=((LOOPBACK,),))
        node = ModelNode(name, inputs, outputs, Repeat(_REPEATS), handler, frozenset([LOOPBACK]))
        self.nodes.append(node)
        self.streams.append(f"{name}_0")

    def _add(self, node: ModelNode) -> None:
        self.nodes.append(node)
        self.streams += [stream for _, stream in node.outputs]

    def _choices(self) -> list[str]:
        return [name for name in self._handlers if name != "EarlyClose" or not self._with_bounds]

    def _count(self, most: int) -> int:
        return self.draw(st.integers(1, most))

    def _sources(self, handler: str) -> list[str]:
        if handler in {"FixedSize", "TimestampAlign"}:
            return self.draw(st.lists(st.sampled_from(self.inputs), min_size=1, max_size=3, unique=True))
        if self._with_bounds:
            border = self.draw(st.lists(st.sampled_from(self.inputs), max_size=1))
            return [self.streams[-1], *border]
        return self.draw(st.lists(st.sampled_from(self.streams), min_size=1, max_size=3))

    def _handler(self, name: str, ports: Sequence[Port]) -> Handler:
        match name:
            case "SyncSet":
                order = self.draw(st.permutations(ports))
                cut = self.draw(st.integers(0, len(ports)))
                singles = self.draw(st.booleans())
                chosen = order[:cut]
                sets = [(port,) for port in chosen] if singles else [tuple(chosen)] if chosen else []
                return Handler(name, sets=tuple(sets)) if sets else Handler(name)
            case "FixedSize":
                target = self._count(2)
                trigger = target + self.draw(st.integers(0, 2))
                return Handler(name, trigger=trigger, target=target, fixed_min_size=self.draw(st.booleans()))
            case "TimestampAlign":
                return Handler(name, base=self.draw(st.sampled_from(list(ports))))
            case _:
                return Handler(name)
