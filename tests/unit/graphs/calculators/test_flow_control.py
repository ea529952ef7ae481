"""Calculators that hold back, repeat and count packets: the limiter, the cloner, the loop back, the resampler."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.errors import FailedPrecondition, GraphFailure
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.graphs.calculator import ContractError
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import Packet
from tests.support.graph_nodes import Feed, contract_of, refs, run_nodes

Steps = list[dict[str, list[Packet]]]


def node(calculator: str, inputs: list[str], outputs: list[str], **more: Any) -> NodeConfig:
    """Make a node called like its calculator; ``settings`` are the fields of its options."""
    settings = more.pop("settings", None)
    name = calculator.replace("TensorVector", "Vector") + "Options"
    options = () if settings is None else (message_class(f"mediapipe.{name}")(**settings),)
    sides: dict[str, Any] = {side: refs(*more.pop(side)) for side in ("side_inputs", "side_outputs") if side in more}
    return NodeConfig("", calculator, calculator, refs(*inputs), refs(*outputs), node_options=options, **sides, **more)


async def stepped(nodes: list[NodeConfig], feed: Feed, **side: Any) -> Steps:
    """Run nodes, each packet when the one before has been dealt with, and give what each step has brought."""
    seen: Steps = []
    await run_nodes(nodes, feed, side=side, steps_seen=seen)
    return seen


def values(packets: list[Packet]) -> list[tuple[int, Any]]:
    """Give timestamps and values."""
    return [(packet.timestamp, packet.value) for packet in packets]


# FlowLimiter


async def test_what_the_limited_part_cannot_take_is_dropped() -> None:
    """One packet is on its way at a time; the next one that comes after it has finished is let in."""
    limiter = node("FlowLimiterCalculator", ["in", "FINISHED:done"], ["out", "ALLOW:allow"])
    seen = await stepped(
        [limiter], [(1, {"in": "a"}), (2, {"in": "b"}), (3, {"in": "c"}), (1, {"done": 0}), (4, {"in": "d"})]
    )
    assert seen == [
        {"out": [Packet("a", 1)], "allow": [Packet(True, 1)]},
        {"allow": [Packet(False, 2)]},
        {"allow": [Packet(False, 3)]},
        {},
        {"out": [Packet("d", 4)], "allow": [Packet(True, 4)]},
    ]


async def test_a_queue_keeps_the_newest() -> None:
    """It is let in when the one before has finished."""
    limiter = node("FlowLimiterCalculator", ["in", "FINISHED:done"], ["out"], settings={"max_in_queue": 1})
    seen = await stepped([limiter], [(1, {"in": "a"}), (2, {"in": "b"}), (3, {"in": "c"}), (1, {"done": 0})])
    assert seen == [{"out": [Packet("a", 1)]}, {}, {}, {"out": [Packet("c", 3)]}]


async def test_what_is_dropped_is_told_by_a_bound() -> None:
    """Whoever waits for the limited stream and another goes on at once."""
    limiter = node("FlowLimiterCalculator", ["in", "FINISHED:done"], ["limited"])
    merge = node("MergeCalculator", ["limited", "other"], ["merged"])
    seen = await stepped([limiter, merge], [(1, {"in": "a", "other": 1}), (2, {"in": "b", "other": 2})])
    assert seen == [{"merged": [Packet("a", 1)]}, {"merged": [Packet(2, 2)]}]


async def test_other_inputs_pass_where_the_first_was_let_in() -> None:
    """They are dropped from the first timestamp that was dropped to the next that was let in."""
    limiter = node("FlowLimiterCalculator", ["in", "beside", "FINISHED:done"], ["out", "along"])
    feed: Feed = [
        (1, {"in": "a", "beside": 1}),
        (2, {"in": "b", "beside": 2}),
        (1, {"done": 0}),
        (3, {"in": "c", "beside": 3}),
    ]
    assert await stepped([limiter], feed) == [
        {"out": [Packet("a", 1)], "along": [Packet(1, 1)]},
        {},
        {},
        {"out": [Packet("c", 3)], "along": [Packet(3, 3)]},
    ]


async def test_a_packet_that_does_not_finish_is_given_up() -> None:
    """After the time that the options give, counted in timestamps."""
    limiter = node("FlowLimiterCalculator", ["in", "FINISHED:done"], ["out"], settings={"in_flight_timeout": 10})
    seen = await stepped([limiter], [(1, {"in": "a"}), (11, {"in": "b"}), (12, {"in": "c"})])
    assert seen == [{"out": [Packet("a", 1)]}, {}, {"out": [Packet("c", 12)]}]


async def test_the_limit_may_come_as_a_side_packet() -> None:
    """It goes before the option, and need not be given."""
    limiter = node("FlowLimiterCalculator", ["in", "FINISHED:done"], ["out"], side_inputs=["MAX_IN_FLIGHT:limit"])
    feed = [(1, {"in": "a"}), (2, {"in": "b"}), (3, {"in": "c"})]
    assert values((await run_nodes([limiter], feed, inputs=["done"], side={"limit": 2}))["out"]) == [(1, "a"), (2, "b")]
    assert values((await run_nodes([limiter], feed, inputs=["done"]))["out"]) == [(1, "a")]


async def test_a_limiter_in_a_graph_lets_one_through_after_the_other() -> None:
    """The end of the limited part comes back over a back edge, and the graph ends when its input does."""
    limiter = node(
        "FlowLimiterCalculator", ["in", "FINISHED:out"], ["work"], back_edges=frozenset({Port("FINISHED", 0)})
    )
    work = node("PassThroughCalculator", ["work"], ["out"])
    copy = node("PassThroughCalculator", ["out"], ["seen"])
    seen = await stepped([limiter, work, copy], [(1, {"in": "a"}), (2, {"in": "b"})])
    assert seen == [{"seen": [Packet("a", 1)]}, {"seen": [Packet("b", 2)]}]


# PacketCloner


@pytest.mark.parametrize("inputs", [[":0:a", ":1:b", ":2:tick"], ["TICK:tick", ":0:a", ":1:b"]])
async def test_the_newest_of_each_input_is_repeated_at_every_tick(inputs: list[str]) -> None:
    """The tick is the last input, or the one that is tagged so."""
    cloner = node("PacketClonerCalculator", inputs, ["x", "y"])
    feed: Feed = [(1, {"a": "a1", "b": "b1", "tick": 0}), (2, {"tick": 0}), (3, {"a": "a3"}), (4, {"tick": 0})]
    made = await run_nodes([cloner], feed)
    assert values(made["x"]) == [(1, "a1"), (2, "a1"), (4, "a3")]
    assert values(made["y"]) == [(1, "b1"), (2, "b1"), (4, "b1")]


@pytest.mark.parametrize(
    ("option", "steps"),
    [
        ("output_only_when_all_inputs_received", [{}, {"out": [Packet(1, 1), Packet("a2", 2)]}]),
        ("output_packets_only_when_all_inputs_received", [{"out": [Packet(1, 1)]}, {"out": [Packet("a2", 2)]}]),
    ],
)
async def test_a_cloner_may_wait_for_all_inputs(option: str, steps: Steps) -> None:
    """Before that nothing is sent, or nothing but bounds, by which others can go on."""
    cloner = node("PacketClonerCalculator", ["a", "b", "tick"], ["x", "y"], settings={option: True})
    gate = node("GateCalculator", ["raw", "ALLOW:has_b"], ["b"])
    merge = node("MergeCalculator", ["x", "other"], ["out"])
    feed = [(time, {"a": f"a{time}", "raw": 0, "has_b": time > 1, "tick": 0, "other": time}) for time in (1, 2)]
    seen = await stepped([gate, cloner, merge], feed)
    assert [{name: packets for name, packets in step.items() if name == "out"} for step in seen] == steps


# PreviousLoopback


async def test_a_packet_meets_what_the_one_before_has_led_to() -> None:
    """The first meets nothing and does not wait; a run that led to nothing is met as nothing."""
    loop = node(
        "PreviousLoopbackCalculator",
        ["MAIN:in", "LOOP:result"],
        ["PREV_LOOP:before"],
        back_edges=frozenset({Port("LOOP", 0)}),
    )
    gate = node("GateCalculator", ["in", "ALLOW:allow"], ["result"])
    pairs = node("PassThroughCalculator", [":0:in", ":1:before"], [":0:now", ":1:earlier"])
    tell = node("PassThroughCalculator", ["result"], ["results"])
    feed = [(time, {"in": f"v{time}", "allow": time != 2}) for time in (1, 2, 3, 4)]
    seen = await stepped([loop, gate, pairs, tell], feed)
    assert [values(step["now"]) for step in seen] == [[(time, f"v{time}")] for time in (1, 2, 3, 4)]
    assert [values(step.get("earlier", [])) for step in seen] == [[], [(2, "v1")], [], [(4, "v3")]]


# PacketResampler


def resampler(**settings: Any) -> NodeConfig:
    """Make a resampler; the rate is 10 packets a second unless told otherwise."""
    return node("PacketResamplerCalculator", ["in"], ["out"], settings={"frame_rate": 10.0} | settings)


@pytest.mark.parametrize(
    ("settings", "fed", "expected"),
    [
        ({}, [0, 100_000, 200_000], [(0, 0), (100_000, 100_000), (200_000, 200_000)]),
        ({}, [5, 100_005], [(5, 5), (100_005, 100_005)]),
        # Twice as many as wanted: the closest to each period's timestamp, of equals the later one.
        ({}, [0, 40_000, 90_000, 120_000, 200_000], [(0, 0), (100_000, 90_000), (200_000, 200_000)]),
        ({}, [0, 90_000, 110_000], [(0, 0), (100_000, 110_000)]),
        # Gaps are filled with the last one before.
        ({}, [0, 310_000], [(0, 0), (100_000, 0), (200_000, 0), (300_000, 310_000)]),
        # What is left is sent at the end, unless told not to.
        ({}, [0, 80_000], [(0, 0), (100_000, 80_000)]),
        ({"flush_last_packet": False}, [0, 80_000], [(0, 0)]),
        ({"base_timestamp": 20_000}, [0, 105_000], [(20_000, 0), (120_000, 105_000)]),
        ({"start_time": 100_000, "end_time": 300_000}, [0, 310_000], [(100_000, 0), (200_000, 0)]),
        ({"start_time": 120_000, "end_time": 300_000, "round_limits": True}, [0, 310_000],
         [(100_000, 0), (200_000, 0), (300_000, 310_000)]),
        ({"frame_rate": 100.0, "max_frame_rate": 10.0}, [0, 100_000], [(0, 0), (100_000, 100_000)]),
        ({"frame_rate": 30.0}, [0, 70_000], [(0, 0), (33_333, 0), (66_667, 70_000)]),
    ],
)  # fmt: skip
async def test_a_stream_gets_a_fixed_rate(
    settings: dict[str, Any], fed: list[int], expected: list[tuple[int, int]]
) -> None:
    """Each packet's value is the timestamp at which it came."""
    made = await run_nodes([resampler(**settings)], [(time, {"in": time}) for time in fed])
    assert values(made["out"]) == expected


async def test_a_gap_that_would_fill_the_memory_fails() -> None:
    """A hostile timestamp ends the call, not the server."""
    with pytest.raises(GraphFailure, match="at most 100000 can be filled"):
        await run_nodes([resampler()], [(0, {"in": 0}), (10**15, {"in": 1})])


# Side packets


async def test_a_side_packet_has_a_default() -> None:
    """What the caller gives goes before."""
    constant = NodeConfig(
        "", "c", "ConstantSidePacketCalculator", side_outputs=refs("PACKET:otherwise"), node_options=(packets(True),)
    )
    default = node(
        "DefaultSidePacketCalculator", [], [],
        side_inputs=["OPTIONAL_VALUE:given", "DEFAULT_VALUE:otherwise"], side_outputs=["VALUE:allow"],
    )  # fmt: skip
    gate = node("GateCalculator", ["in"], ["out"], side_inputs=["ALLOW:allow"])
    nodes = [gate, default, constant]
    assert values((await run_nodes(nodes, [(1, {"in": 5})]))["out"]) == [(1, 5)]
    assert values((await run_nodes(nodes, [(1, {"in": 5})], side={"given": False}))["out"]) == []


def packets(*given: Any) -> Any:
    """Make the options of constants."""
    made = message_class("mediapipe.ConstantSidePacketCalculatorOptions")()
    for value in given:
        added = made.packet.add()
        match value:
            case bool():
                added.bool_value = value
            case int():
                added.int_value = value
            case list():
                added.float_vector_value.float_value.extend(value)
    return made


async def test_constants_select_and_allow() -> None:
    """Values of several types stand in one node, each with the index of its output."""
    constants = NodeConfig(
        "", "c", "ConstantSidePacketCalculator",
        side_outputs=refs("PACKET:0:which", "PACKET:1:allow", "PACKET:2:list"), node_options=(packets(1, True, [0.5]),),
    )  # fmt: skip
    mux = node("MuxCalculator", ["INPUT:0:a", "INPUT:1:b"], ["OUTPUT:picked"], side_inputs=["SELECT:which"])
    gate = node("GateCalculator", ["picked"], ["out"], side_inputs=["ALLOW:allow"])
    assert values((await run_nodes([constants, mux, gate], [(1, {"a": 1, "b": 2})]))["out"]) == [(1, 2)]


async def test_a_default_that_nobody_gives_is_missed() -> None:
    """Only the optional value may be absent."""
    default = node("DefaultSidePacketCalculator", [], [], side_inputs=["DEFAULT_VALUE:d"], side_outputs=["VALUE:v"])
    with pytest.raises(FailedPrecondition, match='Side packet "d" is required'):
        await run_nodes([default], [], inputs=["unused"])


@pytest.mark.parametrize(
    "wrong",
    [
        node("FlowLimiterCalculator", ["in"], ["out"]),
        node("FlowLimiterCalculator", ["in", "FINISHED:f"], ["out", "more"]),
        node("FlowLimiterCalculator", ["in", "FINISHED:f"], ["out"], side_inputs=["OTHER:o"]),
        node("PacketClonerCalculator", ["a", "b", "tick"], ["x"]),
        node("PacketClonerCalculator", ["T:a", "tick"], ["x"]),
        node("PreviousLoopbackCalculator", ["MAIN:m"], ["PREV_LOOP:p"]),
        node("PacketResamplerCalculator", ["in"], ["out"]),
        node("PacketResamplerCalculator", ["in"], ["out"], settings={"frame_rate": 2e6}),
        node("PacketResamplerCalculator", ["in"], ["out"], settings={"frame_rate": 1.0, "jitter": 0.5}),
        node("PacketResamplerCalculator", ["in", "more"], ["out"], settings={"frame_rate": 1.0}),
        node("DefaultSidePacketCalculator", [], [], side_inputs=["OPTIONAL_VALUE:o"], side_outputs=["VALUE:v"]),
        node("ConstantSidePacketCalculator", [], [], side_outputs=["PACKET:o"]),
        NodeConfig("", "c", "ConstantSidePacketCalculator", side_outputs=refs("P:o"), node_options=(packets(1),)),
        NodeConfig(
            "", "c", "ConstantSidePacketCalculator", side_outputs=refs("PACKET:o"), node_options=(packets(None),)
        ),
    ],
)
def test_nodes_that_cannot_be(wrong: NodeConfig) -> None:
    """Ports and options are checked when the graph is loaded."""
    with pytest.raises(ContractError):
        contract_of(wrong)
