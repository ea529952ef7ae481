from __future__ import annotations

from ast import literal_eval
from contextlib import suppress
from typing import Any

import pytest

from ovmstrio.core.errors import FailedPrecondition, GraphFailure
from ovmstrio.encoding.messages import message_class
from ovmstrio.graphs.calculator import ContractError
from ovmstrio.graphs.graph_config import NodeConfig, PolicyConfig, Port
from ovmstrio.graphs.packets import Packet
from tests.support.graph_nodes import contract_of, refs, run_nodes

IMMEDIATE = PolicyConfig("ImmediateInputStreamHandler")


def node(calculator: str, inputs: str, outputs: str, options: dict[str, Any] | None = None, **more: Any) -> NodeConfig:
    """Create a node named after its calculator; streams and side packets are lists with blanks between."""
    sides: dict[str, Any] = {
        key: refs(*more.pop(key).split()) for key in ("side_inputs", "side_outputs") if key in more
    }
    message = f"mediapipe.{calculator.replace('TensorVector', 'Vector')}Options"
    made = () if options is None else (message_class(message)(**options),)
    streams = refs(*inputs.split()), refs(*outputs.split())
    return NodeConfig("", calculator, calculator, *streams, node_options=made, **(sides | more))


def gate(inputs: str = "a", outputs: str = "x", options: dict[str, Any] | None = None, **more: Any) -> NodeConfig:
    return node("GateCalculator", inputs, outputs, options, **more)


def pass_through(inputs: str, outputs: str, **more: Any) -> NodeConfig:
    return node("PassThroughCalculator", inputs, outputs, **more)


def mux(inputs: str = "INPUT:0:a INPUT:1:b", outputs: str = "OUTPUT:x", **more: Any) -> NodeConfig:
    return node("MuxCalculator", inputs, outputs, **more)


def limiter(inputs: str = "in FINISHED:done", outputs: str = "out", options: Any = None, **more: Any) -> NodeConfig:
    return node("FlowLimiterCalculator", inputs, outputs, options, **more)


def cloner(inputs: str, **options: bool) -> NodeConfig:
    return node("PacketClonerCalculator", inputs, "x y", options)


def resampler(**options: Any) -> NodeConfig:
    return node("PacketResamplerCalculator", "in", "out", {"frame_rate": 10.0} | options)


def merge(inputs: str) -> NodeConfig:
    return node("MergeCalculator", inputs, "merged")


def concatenate(**options: bool) -> NodeConfig:
    return node("ConcatenateTensorVectorCalculator", "a b", "out", options)


def split(outputs: str, *ranges: tuple[int, int], **options: bool) -> NodeConfig:
    pairs = [{"begin": begin, "end": end} for begin, end in ranges]
    return node("SplitTensorVectorCalculator", "v", outputs, {"ranges": pairs, **options})


def constants(side_outputs: str, *packets: dict[str, Any]) -> NodeConfig:
    return node("ConstantSidePacketCalculator", "", "", {"packet": packets}, side_outputs=side_outputs)


def default(side_inputs: str) -> NodeConfig:
    return node("DefaultSidePacketCalculator", "", "", side_inputs=side_inputs, side_outputs="VALUE:allow")


BEGIN = node("BeginLoopTensorCalculator", "ITERABLE:v", "ITEM:i BATCH_END:e")
BEGIN_WITH_CLONES = node("BeginLoopTensorCalculator", "ITERABLE:v CLONE:c", "ITEM:i CLONE:k BATCH_END:e")
END = node("EndLoopTensorCalculator", "ITEM:i BATCH_END:e", "ITERABLE:result")


def _read(text: str) -> Any:
    with suppress(ValueError, SyntaxError):
        return literal_eval(text)
    return text


def _written(packets: dict[str, list[Packet]]) -> list[str]:
    return [
        f"{name}={str(each.value).replace(' ', '')}@{each.timestamp}"
        for name in sorted(packets)
        for each in packets[name]
    ]


async def check(nodes: list[NodeConfig], scenario: str, **side: Any) -> None:
    """Feed nodes step by step: ``1: a=1 b=2 > x=1@1 | end > y=2@1``, and compare the packets after each step.

    A step has a timestamp, values of inputs, and the packets of each output that come then, by name of the output.
    The step ``end`` has packets that come when the inputs end.
    """
    steps = [step.partition(">") for step in scenario.split("|")]
    feed = []
    for events, _, _ in steps:
        timestamp, *values = events.replace(":", " ", 1).split()
        if timestamp != "end":
            feed.append(
                (int(timestamp), {name: _read(value) for name, _, value in (each.partition("=") for each in values)})
            )
    seen: list[dict[str, list[Packet]]] = []
    outputs = await run_nodes(nodes, feed, side=side, steps_seen=seen)
    seen.append({name: packets[sum(len(step.get(name, ())) for step in seen) :] for name, packets in outputs.items()})
    expected = [packets.split() for _, _, packets in steps]
    assert [_written(step) for step in seen] == expected + [[]] * (len(seen) - len(expected))


@pytest.mark.parametrize(
    ("nodes", "scenario"),
    [
        pytest.param(
            [pass_through("a T:b c", "x T:y z")], "1: a=1 b=2 c=3 > x=1@1 y=2@1 z=3@1 | 2: b=4 | end > y=4@2", id="tags"
        ),
        pytest.param([pass_through("a b", "x y", policy=IMMEDIATE)], "3: a=1 > x=1@3 | 5: b=2 > y=2@5", id="immediate"),
    ],
)
async def test_pass_through(nodes: list[NodeConfig], scenario: str) -> None:
    await check(nodes, scenario)


async def test_side_packets_pass_through_to_nodes_before_it_in_the_file() -> None:
    forward = pass_through("b", "y", side_inputs="given", side_outputs="forwarded")
    await check([gate(side_inputs="ALLOW:forwarded"), forward], "1: a=1 b=2 > x=1@1 y=2@1", given=True)


@pytest.mark.parametrize(
    ("node", "scenario"),
    [
        pytest.param(
            gate("a DISALLOW:shut", "x STATE_CHANGE:y"),
            "1: a=1 shut=False > x=1@1 | 2: a=2 shut=True > y=False@2 | 3: a=3 shut=True | "
            "4: a=4 shut=False > x=4@4 y=True@4",
            id="control stream",
        ),
        pytest.param(gate("a ALLOW:b"), "1: a=1 | 2: b=True", id="no control packet"),
        pytest.param(
            gate("a ALLOW:b", options={"empty_packets_as_allow": True}), "1: a=1 | 2: b=True > x=1@1", id="empty allows"
        ),
        pytest.param(gate(options={"allow": True}), "1: a=1 > x=1@1", id="option allows"),
        pytest.param(gate(options={"allow": False}), "1: a=1", id="option disallows"),
        pytest.param(gate(), "1: a=1", id="no control"),
        pytest.param(gate("ALLOW:a", "STATE_CHANGE:x"), "1: a=True | 2: a=False > x=False@2", id="changes only"),
        pytest.param(gate(options={"allow": True}, side_inputs="ALLOW:s"), "1: a=1 > x=1@1", id="no side packet"),
    ],
)
async def test_gate(node: NodeConfig, scenario: str) -> None:
    await check([node], scenario)


@pytest.mark.parametrize(
    ("tag", "value", "packets"),
    [("ALLOW", True, "x=1@1 y=2@1"), ("ALLOW", False, ""), ("DISALLOW", False, "x=1@1 y=2@1")],
)
async def test_side_packet_controls_a_gate(tag: str, value: bool, packets: str) -> None:
    made = gate("a b", "x y", {"allow": not value}, side_inputs=f"{tag}:s")
    await check([made], f"1: a=1 b=2 > {packets}", s=value)


@pytest.mark.parametrize(
    ("state", "first"),
    [("GATE_ALLOW", "y=False@1"), ("GATE_DISALLOW", ""), ("UNSPECIFIED", "y=False@1"), ("GATE_UNINITIALIZED", "")],
)
async def test_first_state_of_a_gate_is_compared_with_the_initial_one(state: str, first: str) -> None:
    made = gate("a ALLOW:b", "x STATE_CHANGE:y", {"initial_gate_state": state})
    await check([made], f"1: a=1 b=False > {first} | 2: a=2 b=True > x=2@2 y=True@2 | 3: a=3 b=True > x=3@3")


@pytest.mark.parametrize(("passes", "packets"), [(False, ""), (True, "x=1@1 y=2@1")])
async def test_gate_that_stays_shut_ends_its_outputs(passes: bool, packets: str) -> None:
    early = pass_through("shut b", "x y", policy=PolicyConfig("EarlyCloseInputStreamHandler"))
    await check([gate("a", "shut", side_inputs="ALLOW:s"), early], f"1: a=1 b=2 > {packets}", s=passes)


async def test_mux() -> None:
    selected = mux("INPUT:0:a INPUT:1:b SELECT:which", policy=PolicyConfig("MuxInputStreamHandler"))
    await check([selected], "1: a=a1 b=b1 which=1 > x=b1@1 | 2: a=a2 b=b2 which=0 > x=a2@2")
    await check([mux(side_inputs="SELECT:s")], "1: a=a1 | 2: b=b2 | end > x=b2@2", s=1)


@pytest.mark.parametrize(
    ("nodes", "scenario"),
    [
        pytest.param(
            [limiter(outputs="out ALLOW:on")],
            "1: in=a > on=True@1 out=a@1 | 2: in=b > on=False@2 | 3: in=c > on=False@3 | 1: done=0 | "
            "4: in=d > on=True@4 out=d@4",
            id="one packet in flight",
        ),
        pytest.param(
            [limiter(options={"max_in_queue": 1})],
            "1: in=a > out=a@1 | 2: in=b | 3: in=c | 1: done=0 > out=c@3",
            id="queue keeps the newest",
        ),
        pytest.param(
            [limiter(outputs="limited"), merge("limited other")],
            "1: in=a other=1 > merged=a@1 | 2: in=b other=2 > merged=2@2",
            id="drops are announced by bounds",
        ),
        pytest.param(
            [limiter("in second FINISHED:done", "out along")],
            "1: in=a second=1 > along=1@1 out=a@1 | 2: in=b second=2 | 1: done=0 | "
            "3: in=c second=3 > along=3@3 out=c@3",
            id="other inputs are dropped with the first",
        ),
        pytest.param(
            [limiter(options={"in_flight_timeout": 10})],
            "1: in=a > out=a@1 | 11: in=b | 12: in=c > out=c@12",
            id="timeout of a packet in flight",
        ),
        pytest.param(
            [
                limiter("in FINISHED:out", "work", back_edges=frozenset({Port("FINISHED", 0)})),
                pass_through("work", "out"),
                pass_through("out", "seen"),
            ],
            "1: in=a > seen=a@1 | 2: in=b > seen=b@2",
            id="back edge",
        ),
        pytest.param([limiter(side_inputs="MAX_IN_FLIGHT:limit")], "1: in=a > out=a@1 | 2: in=b", id="no side packet"),
    ],
)
async def test_flow_limiter(nodes: list[NodeConfig], scenario: str) -> None:
    await check(nodes, scenario)


async def test_side_packet_is_the_limit_of_packets_in_flight() -> None:
    made = limiter(side_inputs="MAX_IN_FLIGHT:limit")
    await check([made], "1: in=a > out=a@1 | 2: in=b > out=b@2 | 3: in=c", limit=2)


@pytest.mark.parametrize("inputs", [":0:a :1:b :2:tick", "TICK:tick :0:a :1:b"])
async def test_newest_packet_of_each_input_is_repeated_at_every_tick(inputs: str) -> None:
    await check(
        [cloner(inputs)],
        "1: a=a1 b=b1 tick=0 > x=a1@1 y=b1@1 | 2: tick=0 | 3: a=a3 | 4: tick=0 | end > x=a1@2 x=a3@4 y=b1@2 y=b1@4",
    )


@pytest.mark.parametrize(
    ("option", "scenario"),
    [
        ("output_only_when_all_inputs_received", "{} | {} > merged=1@1 merged=a2@2"),
        ("output_packets_only_when_all_inputs_received", "{} > merged=1@1 | {} > merged=a2@2"),
    ],
)
async def test_cloner_waits_for_all_inputs(option: str, scenario: str) -> None:
    nodes = [gate("raw ALLOW:allow", "b"), cloner("a b tick", **{option: True}), merge("x other"), gate("y", "nothing")]
    feed = "{}: a=a{} raw=0 allow={} tick=0 other={}"
    await check(nodes, scenario.format(feed.format(1, 1, False, 1), feed.format(2, 2, True, 2)))


async def test_previous_result_arrives_with_the_next_packet() -> None:
    back_edges = frozenset({Port("LOOP", 0)})
    nodes = [
        node("PreviousLoopbackCalculator", "MAIN:in LOOP:result", "PREV_LOOP:before", back_edges=back_edges),
        gate("in ALLOW:allow", "result"),
        pass_through(":0:in :1:before", ":0:now :1:earlier"),
        gate("result", "nothing"),
    ]
    await check(
        nodes,
        "1: in=v1 allow=True > now=v1@1 | 2: in=v2 allow=False > earlier=v1@2 now=v2@2 | "
        "3: in=v3 allow=True > now=v3@3 | 4: in=v4 allow=True > earlier=v3@4 now=v4@4",
    )


@pytest.mark.parametrize(
    ("options", "timestamps", "expected"),
    [
        ({}, [0, 100_000, 200_000], [(0, 0), (100_000, 100_000), (200_000, 200_000)]),
        ({}, [5, 100_005], [(5, 5), (100_005, 100_005)]),
        # Twice the rate: the closest to each period's timestamp, of equals the later one.
        ({}, [0, 40_000, 90_000, 120_000, 200_000], [(0, 0), (100_000, 90_000), (200_000, 200_000)]),
        ({}, [0, 90_000, 110_000], [(0, 0), (100_000, 110_000)]),
        # Gaps are filled with the last packet before them.
        ({}, [0, 310_000], [(0, 0), (100_000, 0), (200_000, 0), (300_000, 310_000)]),
        # The last packet is sent at the end by default.
        ({}, [0, 80_000], [(0, 0), (100_000, 80_000)]),
        ({"flush_last_packet": False}, [0, 80_000], [(0, 0)]),
        ({"base_timestamp": 20_000}, [0, 105_000], [(20_000, 0), (120_000, 105_000)]),
        ({"start_time": 100_000, "end_time": 300_000}, [0, 310_000], [(100_000, 0), (200_000, 0)]),
        (
            {"start_time": 120_000, "end_time": 300_000, "round_limits": True},
            [0, 310_000],
            [(100_000, 0), (200_000, 0), (300_000, 310_000)],
        ),
        ({"frame_rate": 100.0, "max_frame_rate": 10.0}, [0, 100_000], [(0, 0), (100_000, 100_000)]),
        ({"frame_rate": 30.0}, [0, 70_000], [(0, 0), (33_333, 0), (66_667, 70_000)]),
    ],
)
async def test_stream_is_resampled_to_a_fixed_rate(
    options: dict[str, Any], timestamps: list[int], expected: list[tuple[int, int]]
) -> None:
    outputs = await run_nodes([resampler(**options)], [(time, {"in": time}) for time in timestamps])
    assert [(packet.timestamp, packet.value) for packet in outputs["out"]] == expected


@pytest.mark.parametrize(("side", "packets"), [({}, "x=5@1"), ({"given": False}, "")])
async def test_side_packet_has_a_default(side: dict[str, bool], packets: str) -> None:
    otherwise = constants("PACKET:otherwise", {"bool_value": True})
    nodes = [gate(side_inputs="ALLOW:allow"), default("OPTIONAL_VALUE:given DEFAULT_VALUE:otherwise"), otherwise]
    await check(nodes, f"1: a=5 > {packets}", **side)


async def test_default_value_of_a_side_packet_is_required() -> None:
    with pytest.raises(FailedPrecondition, match='Side packet "d" is required'):
        await run_nodes([default("DEFAULT_VALUE:d")], [], inputs=["unused"])


async def test_constants_have_types_and_indexes() -> None:
    packets = {"int_value": 1}, {"bool_value": True}, {"float_vector_value": {"float_value": [0.5]}}
    nodes = [
        constants("PACKET:0:which PACKET:1:allow PACKET:2:list", *packets),
        mux(outputs="OUTPUT:picked", side_inputs="SELECT:which"),
        gate("picked", "out", side_inputs="ALLOW:allow"),
    ]
    await check(nodes, "1: a=1 b=2 > out=2@1")


@pytest.mark.parametrize(
    ("nodes", "scenario"),
    [
        pytest.param(
            [BEGIN_WITH_CLONES, pass_through("e", "unused")],
            "10: v=('a','b') c=x > i=a@0 i=b@1 k=x@0 k=x@1 unused=BatchEnd(timestamp=10)@1 | "
            "20: v=('d',) c=y > i=d@2 k=y@2 unused=BatchEnd(timestamp=20)@2",
            id="elements count timestamps over all vectors",
        ),
        pytest.param(
            [BEGIN, END], "10: v=(1,2) > result=(1,2)@10 | 20: v=(3,) > result=(3,)@20", id="one result for each vector"
        ),
        pytest.param(
            [BEGIN, END, merge("result other")],
            "10: v=() other=alone > merged=alone@10 | 20: v=('a',) other=late > merged=('a',)@20",
            id="empty vector is announced by a bound",
        ),
    ],
)
async def test_loops_over_vectors(nodes: list[NodeConfig], scenario: str) -> None:
    await check(nodes, scenario)


@pytest.mark.parametrize(
    ("calculator", "scenario"),
    [
        pytest.param(
            concatenate(),
            "1: a=(1,2) b=(3,) > out=(1,2,3)@1 | 2: b=(4,) | end > out=(4,)@2",
            id="missing inputs are left out",
        ),
        pytest.param(
            concatenate(only_emit_if_all_present=True),
            "1: a=(1,2) b=(3,) > out=(1,2,3)@1 | 2: b=(4,)",
            id="all required",
        ),
        pytest.param(split("x y", (0, 1), (1, 3)), "5: v=(1,2,3) > x=(1,)@5 y=(2,3)@5", id="vectors"),
        pytest.param(split("x y", (2, 3), (0, 1), element_only=True), "5: v=(1,2,3) > x=3@5 y=1@5", id="elements"),
        pytest.param(split("x", (2, 3), (0, 1), combine_outputs=True), "5: v=(1,2,3) > x=(3,1)@5", id="combined"),
    ],
)
async def test_vectors_are_joined_and_split(calculator: NodeConfig, scenario: str) -> None:
    await check([calculator], scenario)


@pytest.mark.parametrize(
    ("nodes", "feed", "steps", "text"),
    [
        pytest.param(
            [pass_through("a a a", "x y z", policy=IMMEDIATE)],
            [(2, {"a": 1}), (4, {"a": 2})],
            1,
            '"y". Current minimum expected timestamp is 3 but received 2',
            id="one stream on several inputs",
        ),
        pytest.param(
            [pass_through("a", "m"), pass_through("a m", "x y", policy=IMMEDIATE)],
            [(2, {"a": 1}), (4, {"a": 2})],
            1,
            '"y". Current minimum expected timestamp is 3 but received 2',
            id="a stream and what a node makes of it",
        ),
        pytest.param(
            [merge("a b"), pass_through("merged", "n"), pass_through("merged n", "x y", policy=IMMEDIATE)],
            [(3, {"a": 1, "b": 2})],
            1,
            '"y". Current minimum expected timestamp is 4 but received 3',
            id="packets of two nodes",
        ),
        pytest.param(
            [pass_through("a b", "m n"), pass_through("m a", "x y", policy=IMMEDIATE)],
            [(2, {"a": 1}), (4, {"a": 2}), (5, {"a": 3})],
            3,
            '"x". Current minimum expected timestamp is 6 but received 2',
            id="packets that the end releases",
        ),
    ],
)
async def test_immediate_nodes_fail_at_the_packets_at_which_mediapipe_fails(
    nodes: list[NodeConfig], feed: list[tuple[int, dict[str, int]]], steps: int, text: str
) -> None:
    seen: list[dict[str, list[Packet]]] = []
    with pytest.raises(GraphFailure, match=f"Packet timestamp mismatch .* stream {text}"):
        await run_nodes(nodes, feed, inputs=("a", "b"), steps_seen=seen)
    assert len(seen) == steps


@pytest.mark.parametrize(
    ("calculator", "scenario", "side", "text"),
    [
        (
            pass_through("a b", "x y", policy=IMMEDIATE),
            "5: a=1 | 3: b=2",
            {},
            'Packet timestamp mismatch .* stream "y". Current minimum expected timestamp is 6 but received 3',
        ),
        (mux(side_inputs="SELECT:s"), "1: a=1 b=2", {"s": 2}, "SELECT is 2, but there is no input INPUT:2"),
        (mux(side_inputs="SELECT:s"), "1: a=1 b=2", {"s": -1}, "SELECT is -1"),
        (resampler(), "0: in=0 | 1000000000000000: in=1", {}, "at most 100000 can be filled"),
        (split("x", (0, 4)), "5: v=(1,)", {}, "the vector has 1 elements, the ranges need 4"),
    ],
)
async def test_invalid_packets_fail_the_graph(
    calculator: NodeConfig, scenario: str, side: dict[str, int], text: str
) -> None:
    with pytest.raises(GraphFailure, match=text):
        await check([calculator], scenario, **side)


@pytest.mark.parametrize(
    "invalid",
    [
        pass_through("a", "T:x"),
        pass_through("a b", "x"),
        pass_through("a", "x y"),
        pass_through("a", "x", side_inputs="s", side_outputs="T:t"),
    ],
)
def test_inputs_and_outputs_of_pass_through_match(invalid: NodeConfig) -> None:
    with pytest.raises(ContractError, match="must use matching tags and indexes"):
        contract_of(invalid)


@pytest.mark.parametrize(
    "invalid",
    [
        gate("a ALLOW:b", side_inputs="DISALLOW:c"),
        gate("a ALLOW:b", "x y"),
        gate("a ALLOW:b", side_inputs="OTHER:c"),
        mux("INPUT:a"),
        mux("SELECT:a"),
        mux("INPUT:a SELECT:b", side_inputs="SELECT:s"),
        mux("INPUT:a SELECT:b c"),
        mux("INPUT:a SELECT:b", "x"),
        limiter("in"),
        limiter(outputs="out more"),
        limiter(side_inputs="OTHER:o"),
        node("PacketClonerCalculator", "a b tick", "x"),
        node("PacketClonerCalculator", "T:a tick", "x"),
        node("PreviousLoopbackCalculator", "MAIN:m", "PREV_LOOP:p"),
        node("PacketResamplerCalculator", "in", "out"),
        resampler(frame_rate=2e6),
        resampler(frame_rate=1.0, jitter=0.5),
        node("PacketResamplerCalculator", "in more", "out", {"frame_rate": 1.0}),
        default("OPTIONAL_VALUE:o"),
        node("ConstantSidePacketCalculator", "", "", side_outputs="PACKET:o"),
        constants("P:o", {"int_value": 1}),
        constants("PACKET:o", {}),
        node("SplitTensorVectorCalculator", "v", "x"),
        split("x", (0, 1), (1, 2)),
        split("x", (1, 1)),
        split("x", (0, 2), element_only=True),
        split("x y", (0, 2), (1, 3)),
        node("BeginLoopTensorCalculator", "ITERABLE:v", "ITEM:i"),
        node("BeginLoopTensorCalculator", "ITERABLE:v CLONE:c", "ITEM:i BATCH_END:e"),
        node("BeginLoopTensorCalculator", "ITERABLE:v OTHER:c", "ITEM:i BATCH_END:e"),
        node("EndLoopTensorCalculator", "ITEM:i", "ITERABLE:v"),
        node("ConcatenateTensorVectorCalculator", "T:a", "x"),
        node("MergeCalculator", "a", "T:x"),
    ],
)
def test_invalid_ports_and_options_are_refused(invalid: NodeConfig) -> None:
    with pytest.raises(ContractError):
        contract_of(invalid)
