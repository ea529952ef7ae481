"""Input policies in whole graphs: which packets leave a node, at which timestamps, and when."""

from __future__ import annotations

import pytest

from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig
from ovmstrio.runtimes.graphs.packets import Packet
from tests.support.graph_nodes import Feed, refs, run_nodes
from tests.support.policies import policy_config

FEED: Feed = [(1, {"a": "a1", "b": "b1"}), (2, {"a": "a2"}), (3, {"b": "b3"}), (4, {"a": "a4", "b": "b4"})]


def passing(handler: str, options: str = "") -> NodeConfig:
    """Make a node that sends on what its policy gives it."""
    ports = refs("A:a", "B:b"), refs("A:x", "B:y")
    return NodeConfig("", "pass", "PassThroughCalculator", *ports, policy=policy_config(handler, options))


async def stepped(node: NodeConfig, feed: Feed) -> list[list[tuple[int, str]]]:
    """Give what each step of a feed brings, in the order of timestamps."""
    seen: list[dict[str, list[Packet]]] = []
    await run_nodes([node], feed, steps_seen=seen)
    return [
        sorted((packet.timestamp, packet.value) for packets in step.values() for packet in packets) for step in seen
    ]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        ("Default", [[(1, "a1"), (1, "b1")], [], [(2, "a2")], [(3, "b3"), (4, "a4"), (4, "b4")]]),
        ("EarlyClose", [[(1, "a1"), (1, "b1")], [], [(2, "a2")], [(3, "b3"), (4, "a4"), (4, "b4")]]),
        ("Immediate", [[(1, "a1"), (1, "b1")], [(2, "a2")], [(3, "b3")], [(4, "a4"), (4, "b4")]]),
        ("Barrier", [[(1, "a1"), (1, "b1")], [], [(2, "a2"), (2, "b3")], [(4, "a4"), (4, "b4")]]),
    ],
)
async def test_each_step_brings_what_the_policy_lets_run(handler: str, expected: list[list[tuple[int, str]]]) -> None:
    """Two inputs that come at once, then each alone, then both."""
    assert await stepped(passing(handler), FEED) == expected


async def test_early_close_drops_what_waits_when_the_first_input_ends() -> None:
    """The last packet of the other input never meets its partner."""
    shut = NodeConfig("", "gate", "GateCalculator", refs("raw"), refs("a"), refs("ALLOW:s"))
    feed: Feed = [(1, {"raw": 1, "b": "b1"}), (2, {"b": "b2"})]
    for handler, expected in (("Default", [Packet("b1", 1), Packet("b2", 2)]), ("EarlyClose", [])):
        made = await run_nodes([shut, passing(handler)], feed, side={"s": False})
        assert made == {"x": [], "y": expected}


async def test_timestamps_are_aligned_to_the_base() -> None:
    """Packets of the base run alone until the other input has one; from then on that is told on the base's clock."""
    node = passing("TimestampAlign", 'timestamp_base_tag_index: "A:0"')
    feed: Feed = [(10, {"a": "a10"}), (1000, {"b": "b0"}), (20, {"a": "a20"}), (1005, {"b": "b5"}), (25, {"a": "a25"})]
    assert await stepped(node, feed) == [[(10, "a10")], [], [(20, "a20"), (20, "b0")], [], [(25, "a25"), (25, "b5")]]


async def test_a_barrier_ends_with_its_first_input() -> None:
    """What is left of the other has no partner."""
    feed: Feed = [(1, {"a": "a1"}), (2, {"a": "a2"}), (7, {"b": "b7"})]
    assert await run_nodes([passing("Barrier")], feed) == {"x": [Packet("a1", 1)], "y": [Packet("b7", 1)]}
