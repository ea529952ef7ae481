from __future__ import annotations

import re

import pytest

from ovmstrio.graphs.graph_config import Port
from ovmstrio.graphs.packets import MAX, MIN, Packet
from ovmstrio.graphs.policies import CLOSE, create_policy
from ovmstrio.graphs.streams import InputStream
from tests.unit.graphs.random_graphs import policy_config

EVENT = re.compile(r"(?P<tag>[A-Z]+)(?:@(?P<timestamp>\d+)(?:=(?P<value>\d+))?|<(?P<bound>\d+)|!)")


class PolicyDriver:
    """A policy over inputs, and scenarios written as text: ``A@5 | B@5 > 5: A=5 B=5``.

    Each step has events, and the runs that are possible after them. ``A@5`` is a packet of value 5 at timestamp 5,
    ``A@5=1`` one of value 1, ``A<5`` a bound, ``A!`` the end of A. A run is its timestamp and the values of inputs.
    """

    def __init__(
        self, handler: str, tags: str, options: str = "", *, limit: int = -1, processes_bounds: bool = False
    ) -> None:
        self.streams = {tag: InputStream(tag.lower(), Port(tag, 0), limit=limit) for tag in tags.split()}
        self.settled: list[dict[str, int]] = []
        self._policy = create_policy(
            policy_config(handler, options), list(self.streams.values()), processes_bounds=processes_bounds
        )

    def check(self, scenario: str) -> None:
        for step in scenario.split("|"):
            events, _, runs = step.partition(">")
            self.feed(events)
            assert self.runs() == [run.strip() for run in runs.split(",") if run], step

    def feed(self, events: str) -> None:
        for event in EVENT.finditer(events):
            stream, timestamp, bound = self.streams[event["tag"]], event["timestamp"], event["bound"]
            if timestamp:
                stream.push(Packet(int(event["value"] or timestamp), int(timestamp)))
            elif bound:
                stream.advance(int(bound))
            else:
                stream.close()
            self._policy.arrived()

    def bound(self) -> int:
        return self._policy.bound()

    def runs(self) -> list[str]:
        runs: list[str] = []
        while (step := self._policy.next()) is not None:
            if step is CLOSE:
                return [*runs, "close"]
            values = [f"{port.tag}={value}" for port, value in step.inputs.items()]
            runs.append(" ".join([f"{step.timestamp}:", *values]))
            self.settled.append({port.tag: timestamp for port, timestamp in step.settled.items()})
        return runs


def sync_sets(*sets: str) -> str:
    return " ".join(f"sync_set {{ {' '.join(f'tag_index: {tag!r}' for tag in tags.split())} }}" for tags in sets)


def fixed_size(trigger: int, target: int, *, fixed_min_size: bool = False) -> str:
    return f"trigger_queue_size: {trigger} target_queue_size: {target} fixed_min_size: {str(fixed_min_size).lower()}"


def test_end_of_an_immediate_input_settles_the_next_timestamp_of_the_others() -> None:
    driver = PolicyDriver("Immediate", "A B")
    driver.check("A@3 > 3: A=3")
    assert driver.bound() == driver.streams["B"].bound
    driver.check("B@6 > 6: B=6 | A!")
    assert driver.bound() == 8
    driver.check("B@9 > 9: B=9 | B! > close")


@pytest.mark.parametrize("handler", ["Default", "SyncSet"])
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("A@5 | B@5 > 5: A=5 B=5", id="inputs of one timestamp meet"),
        pytest.param("A@5 B@7 > 5: A=5 | A@7 > 7: A=7 B=7", id="later packet"),
        pytest.param("A@5 A@6 B! > 5: A=5, 6: A=6", id="end of the other input"),
        pytest.param("A@5 A@6 B<5 | B<6 > 5: A=5 | B<7 > 6: A=6", id="bounds"),
        pytest.param("A@3 A@9 B@1 B@9 > 1: B=1, 3: A=3, 9: A=9 B=9", id="ascending timestamps"),
        pytest.param("A@1 A! | B! > 1: A=1, close", id="closes when all inputs are empty"),
        pytest.param("B@1 A@1 > 1: A=1 B=1", id="order of tags"),
    ],
)
def test_inputs_of_one_set_are_synchronized(handler: str, scenario: str) -> None:
    PolicyDriver(handler, "A B").check(scenario)


@pytest.mark.parametrize(
    ("handler", "scenario"),
    [
        pytest.param("EarlyClose", "A@1 | B@2 > 1: A=1", id="early close: synchronized"),
        pytest.param("EarlyClose", "A@1 A@2 B! > close", id="early close: first end closes"),
        pytest.param("EarlyClose", "A@1 A@2 B@1 B! > 1: A=1 B=1, close", id="early close: packets before the end"),
        pytest.param("Immediate", "A@5 > 5: A=5 | B@5 > 5: B=5", id="immediate: inputs do not wait"),
        pytest.param("Immediate", "A@5 > 5: A=5 | B@3 > 3: B=3", id="immediate: timestamps may go back"),
        pytest.param("Immediate", "A@1 A@5 B@5 > 1: A=1, 5: A=5 B=5", id="immediate: shared run"),
        pytest.param("Immediate", "A@5 B@3 B@5 > 5: A=5, 3: B=3, 5: B=5", id="immediate: first packet is taken"),
        # MediaPipe runs a node when an input ends; handlers that read their first input would fail there.
        pytest.param("Immediate", "A! | B@1 B! > 1: B=1, close", id="immediate: end of an input"),
        pytest.param("Barrier", "A@7 A@8 | B@3 > 3: A=7 B=3 | B@9 > 8: A=8 B=9", id="barrier: pairs"),
        pytest.param("Barrier", "A@1 B<1000", id="barrier: bounds settle nothing"),
        pytest.param(
            "Barrier", "A@5 A@6 A@30 B@1 B@20 B@21 > 1: A=5 B=1, 6: A=6 B=20, 21: A=30 B=21", id="barrier: earliest"
        ),
        pytest.param("Barrier", "A@1 A@2 B@1 B! > 1: A=1 B=1, close", id="barrier: first end closes"),
    ],
)
def test_policies_without_options(handler: str, scenario: str) -> None:
    PolicyDriver(handler, "A B").check(scenario)


@pytest.mark.parametrize(
    ("sets", "scenario"),
    [
        pytest.param(["B:0"], "A@5 > 5: A=5 | B@3 > 3: B=3", id="independent"),
        pytest.param(["A", "B"], "A@5 B@3 > 3: B=3, 5: A=5", id="earliest first"),
        pytest.param(["A", "B"], "B@5 A@5 > 5: A=5, 5: B=5", id="first declared first"),
        pytest.param(["B", "A"], "A@5 B@5 > 5: B=5, 5: A=5", id="first declared first, reversed"),
        pytest.param(["C:0"], "A@5 C@5 > 5: C=5 | B@5 > 5: A=5 B=5", id="other inputs form the last set"),
        pytest.param(["A B"], "A@1 C@9 > 9: C=9 | B@4 > 1: A=1", id="waiting set does not block others"),
        pytest.param(["C A B"], "A@1 B@1 C@1 > 1: A=1 B=1 C=1", id="order of tags"),
        pytest.param(["A"], "A! C! | B@1 > 1: B=1 | B! > close", id="closes after the last set"),
    ],
)
def test_sync_sets_run_separately(sets: list[str], scenario: str) -> None:
    tags = "A B C" if "C" in scenario else "A B"
    PolicyDriver("SyncSet", tags, sync_sets(*sets)).check(scenario)


@pytest.mark.parametrize(
    ("base", "scenario"),
    [
        pytest.param("A:0", "A@10 A@11 > 10: A=10, 11: A=11 | B@1000", id="base runs alone before clocks are known"),
        pytest.param(
            "A:0",
            "B@1000 B@1001 B@1005 | A@12 > 12: A=12 B=1000 | A@15 > 13: B=1001, 15: A=15 | A@17 > 17: A=17 B=1005",
            id="first packets are simultaneous",
        ),
        pytest.param("A:0", "A@10 B@100 > 10: A=10 B=100 | A@12 B<102 | B<103 > 12: A=12", id="bounds are shifted"),
        pytest.param("B", "A@5 B@500 > 500: A=5 B=500", id="base is not the first input"),
        pytest.param(
            "A:0", "A@10 A@12 B@100 B! > 10: A=10 B=100, 12: A=12 | A! > close", id="closes when all inputs are empty"
        ),
        pytest.param("A:0", "B@100 A! > close", id="base ends before clocks are known"),
    ],
)
def test_timestamps_are_aligned_to_the_base(base: str, scenario: str) -> None:
    PolicyDriver("TimestampAlign", "A B", f'timestamp_base_tag_index: "{base}"').check(scenario)


@pytest.mark.parametrize(
    ("options", "scenario"),
    [
        pytest.param("", "A@1 A@2 A@3 > 3: A=3", id="default keeps the newest"),
        pytest.param("", "A@0 > 0: A=0 | A@1 > 1: A=1 | A@2 > 2: A=2", id="fast node loses nothing"),
        pytest.param("", "A@1 A@2 A! > 2: A=2, close", id="closes when all inputs are empty"),
        *[
            pytest.param(
                fixed_size(trigger, target),
                "A@1 A@2 A@3 A@4 A@5 A@6 > " + ", ".join(f"{kept}: A={kept}" for kept in range(first, 7)),
                id=f"trigger {trigger}, target {target}",
            )
            for trigger, target, first in [(2, 1, 6), (3, 1, 5), (3, 2, 5), (4, 1, 4), (4, 3, 4), (9, 1, 1)]
        ],
    ],
)
def test_fixed_size_queue_is_cut_to_its_target_at_its_trigger(options: str, scenario: str) -> None:
    PolicyDriver("FixedSize", "A", options).check(scenario)


SIX_AND_FIVE = "A@1 A@2 A@3 A@4 A@5 A@6 B@3 B@4 B@5 B@6 B@7 | "


@pytest.mark.parametrize(
    ("options", "scenario"),
    [
        pytest.param(fixed_size(3, 1), "B@1 B@2 A@1 A@2 A@3 | B@3 C@3 > 3: A=3 B=3 C=3", id="all cut at one timestamp"),
        pytest.param(
            fixed_size(4, 3),
            SIX_AND_FIVE + "C@4 | C@5 > 5: A=5 B=5 C=5 | C@6 > 6: A=6 B=6 C=6 | C@7 | A! B! C! > 7: B=7 C=7, close",
            id="late packets are dropped",
        ),
        pytest.param(
            fixed_size(4, 3, fixed_min_size=True),
            SIX_AND_FIVE
            + "C@4 > 1: A=1, 2: A=2, 3: A=3 B=3, 4: A=4 B=4 C=4 | C@5 > 5: A=5 B=5 C=5 | C@6 > 6: A=6 B=6 C=6 | "
            + "C@7 A! B! C! > 7: B=7 C=7, close",
            id="fixed minimum: one short queue prevents cuts",
        ),
        pytest.param(
            fixed_size(3, 2, fixed_min_size=True),
            "A@1 A@2 A@3 B@1 B@5 B@6 C@1 C@5 C@6 > 2: A=2, 3: A=3 | A! > 5: B=5 C=5, 6: B=6 C=6 | B! C! > close",
            id="fixed minimum: shortest tail decides",
        ),
    ],
)
def test_fixed_size_queues_are_cut_together(options: str, scenario: str) -> None:
    PolicyDriver("FixedSize", "A B C", options).check(scenario)


def test_fixed_size_queue_stays_short_while_another_input_is_silent() -> None:
    driver = PolicyDriver("FixedSize", "A B", limit=2)
    for timestamp in range(50):
        assert not driver.streams["A"].is_full
        driver.feed(f"A@{timestamp}")
    assert [packet.timestamp for packet in driver.streams["A"].queue] == [49]
    assert driver.runs() == []


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("A@1 B@1 | SELECT@1=1 > 1: B=1 SELECT=1", id="control selects an input"),
        pytest.param(
            "A@1 A@2 A@3 B@1 B@2 B@3 SELECT@2=0 > 2: A=2 SELECT=0 | SELECT@3=1 > 3: B=3 SELECT=1",
            id="unselected packets are dropped",
        ),
        pytest.param("SELECT@4=0 B@4 | A@4 > 4: A=4 SELECT=0", id="waits for the selected input"),
        pytest.param("SELECT@4=0 A<4 | A<5 > 4: SELECT=0", id="bound of the selected input"),
        pytest.param("SELECT@4=0 | A! > 4: SELECT=0", id="end of the selected input"),
        pytest.param("SELECT@4=0 A@9 > 4: SELECT=0 | SELECT@9=0 > 9: A=9 SELECT=0", id="later packet"),
        pytest.param("A! SELECT@1=0 SELECT@2=1 B@2 > 1: SELECT=0, 2: B=2 SELECT=1", id="other inputs go on"),
        pytest.param("A@1 SELECT! > close", id="closes with the control input"),
    ],
)
def test_mux_reads_the_selected_input(scenario: str) -> None:
    PolicyDriver("Mux", "A B SELECT").check(scenario)


def test_one_set_runs_at_the_last_settled_timestamp() -> None:
    driver = PolicyDriver("Default", "A B", processes_bounds=True)
    driver.check("A@5 | B<4 > 3: | B<9 > 5: A=5 | A<8 > 7: | A! B! > close")


@pytest.mark.parametrize(
    ("scenario", "settled"),
    [
        pytest.param(
            f"A@5 > 5: A=5 | A! > {MAX}: | B@7 > 7: B=7 | B! > {MAX}:, close",
            [{"A": 5, "B": MIN - 1}, {"A": MAX, "B": MIN - 1}, {"A": MAX, "B": 7}, {"A": MAX, "B": MAX}],
            id="each end is reported",
        ),
        pytest.param("A@5 B@5 B@8 > 5: A=5 B=5, 8: B=8", [{"A": 5, "B": 5}, {"A": 5, "B": 8}], id="shared run"),
    ],
)
def test_separate_inputs_are_settled_separately(scenario: str, settled: list[dict[str, int]]) -> None:
    driver = PolicyDriver("Immediate", "A B", processes_bounds=True)
    driver.check(scenario)
    assert driver.settled == settled
