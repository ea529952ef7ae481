"""The console of a server of several processes: one answer, whoever is asked."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from ovmstrio.api.console.frames import FrameMaker
from ovmstrio.api.console.gathering import FAILURES, LINES, TRACES, Gathering
from ovmstrio.api.console.merged_services import merged_figures, merged_rows
from ovmstrio.core.errors import ModelFailure, NotFound
from ovmstrio.core.events import CallEvent, Door
from ovmstrio.core.siblings import Siblings
from ovmstrio.core.time_bands import TIME_BOUNDS, no_times
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.observability.call_statistics import CallStatistics
from ovmstrio.observability.recent_past import RecentPast
from ovmstrio.observability.tracing.recent import KeptSpan, RecentTraces
from tests.support.pass_through import load_pass_through
from tests.unit.api.rest.servers import stack


class _Siblings:
    """The other processes, all in this one; one that is stuck never answers."""

    def __init__(self, row: int, every: dict[int, _Siblings]) -> None:
        self.row = row
        self.every = every
        every[row] = self
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[int, Any]] = []
        self.is_stuck = False

    @property
    def others(self) -> Sequence[int]:
        return [row for row in self.every if row != self.row]

    async def ask_soon(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        del seconds
        found = {}
        for row, (question, *arguments) in questions.items():
            self.asked.append((row, question))
            if not self.every[row].is_stuck:
                found[row] = await self.every[row].answers[question](*arguments)
        return found

    def answer_with(self, question: str, answer: Any) -> None:
        self.answers[question] = answer


class _Worker:
    """One process."""

    def __init__(self, plane: DataPlane, past: RecentPast, siblings: _Siblings) -> None:
        self.plane = plane
        self.past = past
        self.siblings = siblings
        self.begin()

    def begin(self) -> None:
        """Be another process than before."""
        self.gathering = Gathering(self.plane, self.past)
        self.frames = FrameMaker(self.plane, self.gathering)

    def count(self, number: int, seconds: float, *, failed: int = 0) -> None:
        """Count calls of ``echo`` that took so long, of which some failed."""
        statistics = self.plane.call_statistics
        for each in range(number):
            event = _Ended(seconds, "ERROR" if each < failed else "OK")
            statistics.call_finished(cast("CallEvent", event))


class _Ended:
    """A call that has ended."""

    name, version, method = "echo", "1", "ModelInfer"
    queue_seconds = 0.0

    def __init__(self, seconds: float, code: str) -> None:
        self.seconds = self.compute_seconds = seconds
        self.code = code


@asynccontextmanager
async def _workers(folder: Path, *loaders: Any) -> AsyncIterator[list[_Worker]]:
    every: dict[int, _Siblings] = {}
    async with AsyncExitStack() as opened:
        made = []
        for row, loader in enumerate(loaders or (load_pass_through, load_pass_through)):
            running = stack(folder / str(row), loader=loader, traces=RecentTraces())
            plane, _, _ = await opened.enter_async_context(running)
            siblings = _Siblings(row, every)
            plane.siblings = cast("Siblings", siblings)
            made.append(_Worker(plane, RecentPast(), siblings))
        yield made


async def test_counts_are_sums_and_percentiles_are_of_all_times_together(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Of 90 fast calls of one worker and 10 slow ones of another the median is fast and the last hundredth slow."""
    async with _workers(tmp_path) as (one, other):
        await one.frames.frame()
        one.count(90, 0.001)
        other.count(10, 1.0, failed=4)
        await trio.sleep(1)
        frame = await one.frames.frame()
        figures = frame.services["echo"]
        assert (figures["rate"], figures["error_rate"], figures["requests"], figures["errors"]) == (100, 4, 100, 4)
        assert figures["p50"] < 1.5
        assert figures["p99"] > 500
        assert [(each["worker"], each["rate"]) for each in frame.totals["workers"]] == [(0, 90), (1, 10)]
        assert frame.totals["silent"] == []


async def test_whoever_is_asked_tells_the_same(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Those who look by way of the second worker see what those of the first do, and the charts of before."""
    async with _workers(tmp_path) as (one, other):
        for _ in range(3):
            await one.frames.frame()
            one.count(2, 0.001)
            other.count(3, 0.001)
            await trio.sleep(1)
        await one.frames.frame()
        await other.frames.frame()
        assert other.frames.everything[1]["echo"]["requests"] == one.frames.everything[1]["echo"]["requests"] == 15
        before = [each["at"] for each in one.frames.history]
        # The mock clock jumps, and the system's does not: all of them were told within one or two seconds of that.
        assert {int(each["at"]) for each in other.frames.history} >= {int(at) for at in before}


async def test_a_worker_that_does_not_answer_is_named_and_left_alone_for_a_while(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """What it counted meanwhile is told when it is back: as counts, and as a rate over the time that they took."""
    async with _workers(tmp_path) as (one, other):
        await one.frames.frame()
        other.siblings.is_stuck = True
        other.count(40, 0.001)
        for _ in range(3):
            await trio.sleep(1)
            frame = await one.frames.frame()
            assert frame.totals["silent"] == [1]
        assert len(one.siblings.asked) == 2
        other.siblings.is_stuck = False
        for _ in range(4):
            await trio.sleep(1)
            frame = await one.frames.frame()
        assert frame.totals["silent"] == []
        assert one.frames.everything[1]["echo"]["requests"] == 40


async def test_a_worker_that_was_started_anew_counts_from_its_own_beginning(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """What it has counted is new, whatever the one before it had."""
    async with _workers(tmp_path) as (one, other):
        other.count(5, 0.001)
        await one.frames.frame()
        other.plane.call_statistics = CallStatistics()
        other.begin()
        other.count(2, 0.001)
        await trio.sleep(1)
        await one.frames.frame()
        assert one.frames.everything[1]["echo"]["requests"] == 7


async def test_an_idle_server_tells_no_counts_and_no_rows_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A viewer of many services costs next to nothing while nothing happens."""
    async with _workers(tmp_path) as (one, other):
        other.count(5, 0.001)
        assert (await one.gathering.look()).parts[1]["counts"]
        await one.gathering.look()
        told = await one.gathering.look()
        assert (told.parts[1]["counts"], "rows" in told.parts[1], "lines" in told.parts[1]) == ([], False, False)


async def test_who_looks_aside_takes_nothing_from_those_who_watch(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Counts and changes that the list of services, or the log, was told of meanwhile are in the next frame as well."""
    async with _workers(tmp_path) as (one, other):
        await one.frames.frame()
        for worker in (one, other):
            worker.count(3, 0.001)
            await worker.plane.registry.apply(())
        assert (await one.gathering.rows())["echo"]["state"] == "unloaded"
        await one.gathering.look_back(LINES)
        await trio.sleep(1)
        frame = await one.frames.frame()
        assert (frame.services["echo"]["requests"], frame.services["echo"]["rate"]) == (6, 6)
        assert (frame.rows["echo"] or {})["state"] == "unloaded"
        await trio.sleep(1)
        assert (await one.frames.frame()).rows == {}


def _log(worker: _Worker, at: float, text: str) -> None:
    record = logging.makeLogRecord({"levelno": logging.INFO, "msg": text, "created": at})
    worker.past.log.handle(record)


async def test_lines_of_all_workers_are_one_log_in_the_order_of_time(tmp_path: Path) -> None:
    """Each says whose it is, and is told once."""
    async with _workers(tmp_path) as (one, other):
        for number in range(3):
            _log(one, 100.0 + number, f"a{number}")
            _log(other, 100.5 + number, f"b{number}")
        await one.gathering.look_back(LINES)
        await one.gathering.look_back(LINES)
        told = one.gathering.past.lines.since(0)
        assert [(each["event"], each["worker"]) for each in told] == [
            ("a0", 0), ("b0", 1), ("a1", 0), ("b1", 1), ("a2", 0), ("b2", 1)
        ]  # fmt: skip
        assert [each["number"] for each in told] == [1, 2, 3, 4, 5, 6]
        _log(other, 200.0, "later")
        await one.gathering.look_back(LINES)
        assert [each["event"] for each in one.gathering.past.lines.since(6)] == ["later"]


async def test_lines_of_one_process_keep_their_numbers_and_their_order(tmp_path: Path) -> None:
    """Also those whose times are another order, as several threads log, and clocks are set; each is told once."""
    async with stack(tmp_path, loader=load_pass_through) as (plane, _, _):
        alone = _Worker(plane, RecentPast(), _Siblings(0, {}))
        assert plane.siblings is None
        for at in (100.5, 100.0, 200.0, 50.0):
            _log(alone, at, f"at {at}")
        await alone.gathering.look_back(LINES)
        lines = alone.gathering.past.lines
        told = [(each["number"], each["at"], "worker" in each) for each in lines.since(0)]
        assert told == [(1, 100.5, False), (2, 100.0, False), (3, 200.0, False), (4, 50.0, False)]
        assert lines.since(4) == []


async def test_long_logs_come_in_batches_and_stay_in_order(tmp_path: Path) -> None:
    """A line of another worker waits for those of before it that one message had no room for."""
    async with _workers(tmp_path) as (one, other):
        for number in range(400):
            _log(other, 100.0 + number, "b" * 1000)
        _log(one, 150.5, "a")
        with one.gathering.wanting(LINES):
            told = await one.gathering.look()
        assert told.parts[1]["more_lines"] is True
        assert len(told.parts[1]["lines"]) < 300
        await one.gathering.look_back(LINES)
        times = [each["at"] for each in one.gathering.past.lines.since(0)]
        assert (len(times), times) == (401, sorted(times))


async def test_failures_are_told_by_all_workers_and_as_they_are_kept(tmp_path: Path) -> None:
    """With what was sent, which whoever asked may not be shown."""
    async with _workers(tmp_path) as (one, other):
        for worker in (other, one):
            worker.past.failures.call_failed(_failed())
        await one.gathering.look_back(FAILURES)
        told = one.gathering.past.failures.since(0)
        assert [(each["worker"], each["message"]) for each in told] == [(1, "it is broken"), (0, "it is broken")]


def _failed() -> CallEvent:
    event = CallEvent("echo", "1", "model", Door("KServe", "REST"), "ModelInfer")
    event.code, event.error = "ModelFailure", ModelFailure("it is broken")
    return event


def _span(began: int, ended: int, kind: str = "server", parent: str = "") -> KeptSpan:
    return KeptSpan(f"{began:016x}", parent, f"span {began}", kind, began, ended, {})


async def test_traces_are_of_all_workers_and_one_that_went_through_two_is_one(tmp_path: Path) -> None:
    """And calls are recorded by all as long as somebody looks by way of one."""
    async with _workers(tmp_path) as (one, other):
        kept = [worker.plane.traces or RecentTraces() for worker in (one, other)]
        kept[0].keep(7, _span(1_000_000, 9_000_000))
        kept[1].keep(7, _span(2_000_000, 8_000_000, parent=f"{1_000_000:016x}"))
        kept[1].keep(8, _span(3_000_000, 4_000_000))
        assert [each.is_watched for each in kept] == [False, False]
        await one.gathering.look_back(TRACES)
        assert [each.is_watched for each in kept] == [False, True]
        first, second = one.gathering.past.traces
        assert (first["trace_id"][-1], second["trace_id"][-1]) == ("8", "7")
        assert (second["name"], second["spans"], second["milliseconds"]) == ("span 1000000", 2, 8.0)
        whole = await one.gathering.trace(second["trace_id"])
        assert [span["name"] for span in whole["tree"]] == ["span 1000000", "span 2000000"]
        with pytest.raises(NotFound, match="no trace"):
            await one.gathering.trace("ff")


async def test_a_service_that_one_worker_cannot_load_is_degraded_and_says_where(tmp_path: Path) -> None:
    """The list has it once, with the versions of both."""

    async def fail(spec: Any, version: int, directory: Path) -> Any:
        if version == 2:
            raise ModelFailure("the file is broken")
        return await load_pass_through(spec, version, directory)

    async with _workers(tmp_path, load_pass_through, fail) as (one, other):
        for worker in (one, other):
            told = (await worker.gathering.look()).rows["echo"]
            assert (told["state"], told["reason"]) == ("degraded", "worker 1: the file is broken")
            assert [each["version"] for each in told["versions"]] == ["1", "2"]
        document = await one.gathering.document("echo")
        assert (document["state"], len(document["inputs"])) == ("degraded", 2)
        with pytest.raises(NotFound, match="nothing is served as 'none'"):
            await one.gathering.document("none")


def _row(state: str, reason: str = "") -> dict[str, Any]:
    return {"name": "a", "kind": "model", "takes": [], "state": state, "reason": reason, "versions": []}


@pytest.mark.parametrize(
    ("states", "state", "reason"),
    [
        (("ready", "ready"), "ready", ""),
        (("ready", "loading"), "degraded", "worker 1: loading"),
        (("loading", "failed"), "failed", "worker 0: loading; worker 1: failed"),
        (("unloaded", "unloaded"), "unloaded", ""),
    ],
)
def test_a_row_is_as_good_as_what_all_workers_can_do(states: tuple[str, str], state: str, reason: str) -> None:
    """What differs says who is in what state."""
    row = merged_rows({place: {"a": _row(each)} for place, each in enumerate(states)})["a"]
    assert (row["state"], row["reason"]) == (state, reason)


def _figures(band: int, runs: int, **more: Any) -> dict[str, Any]:
    node = {
        "runs": runs,
        "failures": 1,
        "active": 2,
        "seconds": 0.5,
        "p50": 0.0,
        "p99": 0.0,
        "times": {str(band): runs},
    }
    return {"facts": {}, "nodes": {"n": node}, "streams": {"0": runs}, "waiting": {"n": 1}, **more}


def test_figures_of_nodes_are_sums_and_their_percentiles_are_of_all_runs() -> None:
    """Ninety runs of one band and ten of another."""
    one, other = _figures(10, 90), _figures(40, 10)
    merged = merged_figures({0: one, 1: other})
    node = merged["nodes"]["n"]
    assert (node["runs"], node["failures"], node["active"], node["seconds"]) == (100, 2, 4, 1.0)
    assert node["p50"] < TIME_BOUNDS[10] * 1e3 < TIME_BOUNDS[39] * 1e3 < node["p99"]
    assert (merged["streams"], merged["waiting"]) == ({"0": 100}, {"n": 2})
    assert sum(node["times"].values()) == 100 <= len(no_times()) * 100


def test_facts_are_summed_told_once_or_told_by_worker() -> None:
    """Counts add up, lists are joined, what is the same is told once, and what differs says whose it is."""
    one = {"processes": [1], "requests that wait": 2, "streams": 1, "device": "CPU", "runs": "here"}
    other = {"processes": [2], "requests that wait": 3, "streams": 1, "device": "CPU", "runs": "there"}
    sequence = {"id": "7", "requests": 1}
    merged = merged_figures(
        {
            0: _figures(1, 1, facts=one, sequences=[sequence], sequence_count=1),
            1: _figures(1, 1, facts=other, sequences=[], sequence_count=0),
        }
    )
    assert merged["facts"] == {
        "processes": [1, 2],
        "requests that wait": 5,
        "streams": 1,
        "device": "CPU",
        "runs": {"worker 0": "here", "worker 1": "there"},
    }
    assert (merged["sequences"], merged["sequence_count"]) == ([{**sequence, "worker": 0}], 1)
