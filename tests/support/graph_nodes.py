"""Nodes made by code, run by the engine with packets that a test chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import trio
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from ovmstrio.core.servable import LeaseServable
from ovmstrio.runtimes.graphs.calculator import DefinitionScope, InstanceContext, NodeContract
from ovmstrio.runtimes.graphs.calculators import find_kind
from ovmstrio.runtimes.graphs.config.graph_config import GraphConfig, NodeConfig, Port, StreamRef
from ovmstrio.runtimes.graphs.graph_instance import GraphInstance, running
from ovmstrio.runtimes.graphs.graph_plan import LoadedNode, make_graph_plan
from ovmstrio.runtimes.graphs.packets import Packet
from ovmstrio.work.threads.worker_threads import WorkerThreads

Feed = Iterable[tuple[int, Mapping[str, Any]]]
"""What a test pushes: the values of inputs at timestamps."""


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
    for number, (field, value) in enumerate(values.items(), start=1):
        added = message.field.add(name=field, number=number, label=_Field.LABEL_OPTIONAL)
        if isinstance(value, dict):
            entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
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
    return made(**{field: value for field, value in values.items() if not isinstance(value, type)})


class _Everything:
    """Keeps all packets of all outputs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.packets: dict[str, list[Packet]] = {name: [] for name in names}
        self._names = names

    def put(self, output: int, packet: Packet) -> bool:
        self.packets[self._names[output]].append(packet)
        return True

    async def wait_room(self) -> None:
        """There is always room."""


def contract_of(node: NodeConfig) -> NodeContract:
    """Have a node's calculator look at it, and give what it says.

    Raises what the calculator refuses the node with.
    """
    kind = find_kind(node.calculator)
    assert kind is not None
    return kind.contract(node)


async def no_servables(name: str, version: str = "", /) -> NoReturn:
    """Lease nothing, for nodes that call no models."""
    raise AssertionError(name)


async def run_nodes(
    nodes: Sequence[NodeConfig],
    feed: Feed,
    *,
    side: Mapping[str, Any] | None = None,
    lease: LeaseServable = no_servables,
    inputs: Sequence[str] = (),
    steps_seen: list[dict[str, list[Packet]]] | None = None,
) -> dict[str, list[Packet]]:
    """Run nodes as one graph whose inputs are those named in the feed, and whose outputs nobody else reads.

    Each step waits until the graph rests if ``steps_seen`` is given, which then gets what each step of the feed has
    brought, outputs that brought nothing left out.

    Raises what the run failed with.
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
        kind = find_kind(node.calculator)
        assert kind is not None
        loaded.append(LoadedNode(node, kind.contract(node), await kind.load(node, scope)))
    sink = _Everything(outputs)
    context = InstanceContext("graph", {}, "request", float("inf"))
    instance = GraphInstance(make_graph_plan(config, loaded), context, sink, side)
    try:
        async with running(instance):
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
