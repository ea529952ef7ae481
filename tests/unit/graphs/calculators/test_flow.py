"""Calculators that only move packets: pass-through, gate and mux."""

from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.core.errors import GraphFailure
from ovmstrio.protocol.descriptors import message_class
from ovmstrio.runtimes.graphs.calculator import ContractError
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, PolicyConfig
from ovmstrio.runtimes.graphs.packets import Packet
from tests.support.graph_nodes import contract_of, refs, run_nodes


def node(
    calculator: str, inputs: list[str], outputs: list[str], side: list[str] | None = None, **more: Any
) -> NodeConfig:
    """Make a node; its name is the calculator's."""
    return NodeConfig("", calculator, calculator, refs(*inputs), refs(*outputs), refs(*(side or [])), **more)


def gate_options(**values: Any) -> Any:
    """Make a gate's options."""
    return (message_class("mediapipe.GateCalculatorOptions")(**values),)


async def test_packets_pass_through_by_tag_and_by_order() -> None:
    """Each packet goes out at its time where its input's tag and index are."""
    made = node("PassThroughCalculator", ["a", "T:b", "c"], ["x", "T:y", "z"])
    made_at = await run_nodes([made], [(1, {"a": 1, "b": 2, "c": 3}), (2, {"b": 4})])
    assert made_at == {"x": [Packet(1, 1)], "y": [Packet(2, 1), Packet(4, 2)], "z": [Packet(3, 1)]}


async def test_side_packets_pass_through() -> None:
    """A side packet reaches nodes behind, too, which open later whatever their place in the file."""
    gate = node("GateCalculator", ["a"], ["x"], ["ALLOW:forwarded"])
    forward = node("PassThroughCalculator", ["b"], ["y"], ["given"], side_outputs=refs("forwarded"))
    packets = await run_nodes([gate, forward], [(1, {"a": 1, "b": 2})], side={"given": True})
    assert packets == {"x": [Packet(1, 1)], "y": [Packet(2, 1)]}


@pytest.mark.parametrize(
    ("inputs", "outputs", "side_inputs", "side_outputs"),
    [
        (["a"], ["T:x"], [], []),
        (["a", "b"], ["x"], [], []),
        (["a"], ["x", "y"], [], []),
        (["a"], ["x"], ["s"], ["T:t"]),
    ],
)
def test_pass_through_needs_partners(
    inputs: list[str], outputs: list[str], side_inputs: list[str], side_outputs: list[str]
) -> None:
    """Inputs and outputs have the same tags and indexes."""
    with pytest.raises(ContractError, match="must use matching tags and indexes"):
        contract_of(node("PassThroughCalculator", inputs, outputs, side_inputs, side_outputs=refs(*side_outputs)))


@pytest.mark.parametrize(("tag", "value", "passes"), [("ALLOW", 1, True), ("ALLOW", 0, False), ("DISALLOW", 0, True)])
async def test_a_side_packet_opens_or_shuts_a_gate(tag: str, value: int, passes: bool) -> None:
    """The gate stays as it is for the whole run."""
    made = node("GateCalculator", ["a", "b"], ["x", "y"], [f"{tag}:s"])
    packets = await run_nodes([made], [(1, {"a": 1, "b": 2})], side={"s": bool(value)})
    assert packets == ({"x": [Packet(1, 1)], "y": [Packet(2, 1)]} if passes else {"x": [], "y": []})


async def test_a_stream_opens_and_shuts_a_gate_and_changes_are_told() -> None:
    """Data passes at the times at which the control says so."""
    made = node("GateCalculator", ["a", "DISALLOW:shut"], ["x", "STATE_CHANGE:changes"])
    feed = [(time, {"a": time, "shut": time in {2, 3}}) for time in range(1, 5)]
    assert await run_nodes([made], feed) == {
        "x": [Packet(1, 1), Packet(4, 4)],
        "changes": [Packet(False, 2), Packet(True, 4)],
    }


@pytest.mark.parametrize("passes", [False, True])
async def test_a_control_that_says_nothing_is_an_option(passes: bool) -> None:
    """Without a packet of the control, the option decides; without the option the gate is shut."""
    made = node(
        "GateCalculator",
        ["a", "ALLOW:allow"],
        ["x"],
        node_options=gate_options(empty_packets_as_allow=True) if passes else (),
    )
    packets = await run_nodes([made], [(1, {"a": 1}), (2, {"allow": True})])
    assert packets == {"x": [Packet(1, 1)] if passes else []}


@pytest.mark.parametrize("passes", [False, True])
async def test_an_option_opens_or_shuts_a_gate(passes: bool) -> None:
    """A gate without any control does what its option says."""
    made = node("GateCalculator", ["a"], ["x"], node_options=gate_options(allow=passes))
    assert await run_nodes([made], [(1, {"a": 1})]) == {"x": [Packet(1, 1)] if passes else []}


async def test_a_gate_without_any_word_is_shut() -> None:
    """Neither a control nor an option need be there, and a side packet that nobody gives is as good as none."""
    made = node("GateCalculator", ["a"], ["x"])
    assert await run_nodes([made], [(1, {"a": 1})]) == {"x": []}
    made = node("GateCalculator", ["a"], ["x"], ["ALLOW:s"], node_options=gate_options(allow=True))
    assert await run_nodes([made], [(1, {"a": 1})]) == {"x": [Packet(1, 1)]}
    assert await run_nodes([made], [(1, {"a": 1})], side={"s": False}) == {"x": []}


async def test_a_gate_may_do_nothing_but_tell_of_changes() -> None:
    """It needs no data to pass."""
    made = node("GateCalculator", ["ALLOW:a"], ["STATE_CHANGE:x"])
    assert await run_nodes([made], [(1, {"a": True}), (2, {"a": False})]) == {"x": [Packet(False, 2)]}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("GATE_ALLOW", [Packet(False, 1), Packet(True, 2)]),
        ("GATE_DISALLOW", [Packet(True, 2)]),
        ("UNSPECIFIED", [Packet(False, 1), Packet(True, 2)]),
        ("GATE_UNINITIALIZED", [Packet(True, 2)]),
    ],
)
async def test_the_first_state_is_told_against_the_initial_one(state: str, expected: list[Packet]) -> None:
    """Only an initial state that is not initialized lets the first one pass untold."""
    options = gate_options(initial_gate_state=state)
    made = node("GateCalculator", ["a", "ALLOW:b"], ["x", "STATE_CHANGE:changes"], node_options=options)
    feed = [(time, {"a": time, "b": time > 1}) for time in (1, 2, 3)]
    assert (await run_nodes([made], feed))["changes"] == expected


async def test_a_gate_that_stays_shut_ends_its_outputs() -> None:
    """A node behind that ends with the first of its inputs ends with them."""
    gate = node("GateCalculator", ["a"], ["shut"], ["ALLOW:s"])
    early = node(
        "PassThroughCalculator", ["shut", "b"], ["x", "y"], policy=PolicyConfig("EarlyCloseInputStreamHandler")
    )
    feed = [(1, {"a": 1, "b": 2})]
    assert await run_nodes([gate, early], feed, side={"s": False}) == {"x": [], "y": []}
    assert await run_nodes([gate, early], feed, side={"s": True}) == {"x": [Packet(1, 1)], "y": [Packet(2, 1)]}


async def test_nothing_goes_back_behind_what_a_node_has_settled() -> None:
    """A run at 5 settles 5 for every output, also for those of the graph to which it sends nothing."""
    made = node("PassThroughCalculator", ["a", "b"], ["x", "y"], policy=PolicyConfig("ImmediateInputStreamHandler"))
    assert await run_nodes([made], [(3, {"a": 1}), (5, {"b": 2})]) == {"x": [Packet(1, 3)], "y": [Packet(2, 5)]}
    seen: list[dict[str, list[Packet]]] = []
    text = 'Packet timestamp mismatch .* stream "y". Current minimum expected timestamp is 6 but received 3'
    with pytest.raises(GraphFailure, match=text):
        await run_nodes([made], [(5, {"a": 1}), (3, {"b": 2})], steps_seen=seen)


@pytest.mark.parametrize(
    "made",
    [
        node("GateCalculator", ["a", "ALLOW:b"], ["x"], ["DISALLOW:c"]),
        node("GateCalculator", ["a", "ALLOW:b"], ["x", "y"]),
        node("GateCalculator", ["a", "ALLOW:b"], ["x"], ["OTHER:c"]),
        node("MuxCalculator", ["INPUT:a"], ["OUTPUT:x"]),
        node("MuxCalculator", ["SELECT:a"], ["OUTPUT:x"]),
        node("MuxCalculator", ["INPUT:a", "SELECT:b"], ["OUTPUT:x"], ["SELECT:s"]),
        node("MuxCalculator", ["INPUT:a", "SELECT:b", "c"], ["OUTPUT:x"]),
        node("MuxCalculator", ["INPUT:a", "SELECT:b"], ["x"]),
    ],
)
def test_gates_and_muxes_that_cannot_be(made: NodeConfig) -> None:
    """A node has one control at most, and the right ports."""
    with pytest.raises(ContractError):
        contract_of(made)


async def test_a_mux_sends_what_is_selected() -> None:
    """The stream says at each time which input goes out."""
    made = node(
        "MuxCalculator",
        ["INPUT:0:a", "INPUT:1:b", "SELECT:which"],
        ["OUTPUT:x"],
        policy=PolicyConfig("MuxInputStreamHandler"),
    )
    feed = [(1, {"a": "a1", "b": "b1", "which": 1}), (2, {"a": "a2", "b": "b2", "which": 0})]
    assert await run_nodes([made], feed) == {"x": [Packet("b1", 1), Packet("a2", 2)]}


async def test_a_side_packet_selects_for_the_whole_run() -> None:
    """Other inputs are dropped, and times at which the selected one has nothing stay empty."""
    made = node("MuxCalculator", ["INPUT:0:a", "INPUT:1:b"], ["OUTPUT:x"], ["SELECT:s"])
    feed = [(1, {"a": "a1"}), (2, {"b": "b2"})]
    assert await run_nodes([made], feed, side={"s": 1}) == {"x": [Packet("b2", 2)]}


@pytest.mark.parametrize(("side", "text"), [(2, "SELECT is 2, and there is no input INPUT:2"), (-1, "SELECT is -1")])
async def test_selecting_what_is_not_there_fails(side: int, text: str) -> None:
    """The client is told what was selected."""
    made = node("MuxCalculator", ["INPUT:0:a", "INPUT:1:b"], ["OUTPUT:x"], ["SELECT:s"])
    with pytest.raises(GraphFailure, match=text):
        await run_nodes([made], [(1, {"a": 1, "b": 2})], side={"s": side})
