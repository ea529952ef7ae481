from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from ovmstrio.console.aggregator import FAILURES, LINES, TRACES, ConsoleAggregator, merge_figures, merge_rows
from ovmstrio.console.stream import FrameMaker
from ovmstrio.core.errors import ModelFailure, NotFound
from ovmstrio.core.events import ApiInterface, CallEvent
from ovmstrio.core.latency_histogram import HISTOGRAM_BOUNDS, empty_histogram
from ovmstrio.core.worker_peers import WorkerPeers
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.telemetry.call_statistics import CallStatistics
from ovmstrio.telemetry.recent_history import RecentHistory
from ovmstrio.telemetry.recent_traces import FinishedSpan, RecentTraces
from tests.support.stub_registry import load_pass_through
from tests.unit.protocols.servers import load_version_1, stack


class _Peers:
    def __init__(self, row: int, every: dict[int, _Peers]) -> None:
        self.row = row
        self.every = every
        every[row] = self
        self.answers: dict[str, Any] = {}
        self.questions: list[tuple[int, Any]] = []
        self.is_stuck = False

    @property
    def others(self) -> Sequence[int]:
        return [row for row in self.every if row != self.row]

    async def call_within(self, questions: Mapping[int, Sequence[Any]], seconds: float) -> dict[int, Any]:
        found = {}
        for row, (question, *arguments) in questions.items():
            self.questions.append((row, question))
            if not self.every[row].is_stuck:
                found[row] = await self.every[row].answers[question](*arguments)
        return found

    def register_handler(self, question: str, answer: Any) -> None:
        self.answers[question] = answer


class _Worker:
    def __init__(self, plane: DataPlane, peers: _Peers) -> None:
        self.plane = plane
        self.past = RecentHistory()
        self.peers = peers
        self.restart()

    def restart(self) -> None:
        self.gathering = ConsoleAggregator(self.plane, self.past)
        # The mock clock begins at zero.
        self.frames = FrameMaker(self.plane, self.gathering, lambda: 1e6 + trio.current_time())

    @property
    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self.frames.everything[1]["echo"]
        return figures

    def count(self, number: int, seconds: float = 0.001, *, failed: int = 0) -> None:
        for each in range(number):
            code = "ERROR" if each < failed else "OK"
            call = {"name": "echo", "version": "1", "method": "ModelInfer", "queue_seconds": 0.0, "code": code}
            event = SimpleNamespace(**call, seconds=seconds, compute_seconds=seconds)
            self.plane.call_statistics.call_finished(cast("CallEvent", event))

    def log(self, at: float, text: str) -> None:
        self.past.log.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": text, "created": at}))

    async def lines(self, since: int = 0) -> list[dict[str, Any]]:
        await self.gathering.fetch_history(LINES)
        return [*self.gathering.past.lines.since(since)]


@asynccontextmanager
async def _workers(folder: Path, *loaders: Any) -> AsyncIterator[list[_Worker]]:
    every: dict[int, _Peers] = {}
    async with AsyncExitStack() as opened:
        workers = []
        for row, loader in enumerate(loaders or (load_pass_through, load_pass_through)):
            running = stack(folder / str(row), loader=loader, traces=RecentTraces())
            plane, _, _ = await opened.enter_async_context(running)
            peers = _Peers(row, every)
            plane.peers = cast("WorkerPeers", peers)
            workers.append(_Worker(plane, peers))
        yield workers


async def test_counts_and_percentiles_are_of_all_calls(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
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


async def test_every_worker_shows_the_same_figures(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with _workers(tmp_path) as (one, other):
        for _ in range(3):
            await one.frames.frame()
            one.count(2)
            other.count(3)
            await trio.sleep(1)
        await one.frames.frame()
        await other.frames.frame()
        assert other.figures["requests"] == one.figures["requests"] == 15


async def test_the_series_survive_a_restart_of_a_worker(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    async with _workers(tmp_path) as (one, other):
        for each in (one, other):
            nursery.start_soon(each.frames.sample)
        await trio.sleep(2)
        for _ in range(4):
            one.count(10)
            other.count(5, failed=1)
            await trio.sleep(5)
        one.restart()
        nursery.start_soon(one.frames.sample)
        await trio.sleep(1)
        for service in ("", "echo"):
            document = await one.gathering.series_document(service)
            assert document["series"]["rate"][-3:] == [3, 3, 3]
            assert document["series"]["error_rate"][-3:] == [0.2, 0.2, 0.2]
        assert one.gathering.series.document("echo") == await one.gathering.series_document("echo")
        nursery.cancel_scope.cancel()


async def test_a_stuck_worker_is_listed_and_not_queried(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with _workers(tmp_path) as (one, other):
        await one.frames.frame()
        other.peers.is_stuck = True
        other.count(40)
        for _ in range(3):
            await trio.sleep(1)
            frame = await one.frames.frame()
            assert frame.totals["silent"] == [1]
        assert len(one.peers.questions) == 2
        other.peers.is_stuck = False
        for _ in range(4):
            await trio.sleep(1)
            frame = await one.frames.frame()
        assert frame.totals["silent"] == []
        assert one.figures["requests"] == 40


async def test_counts_of_a_restarted_worker_are_added(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with _workers(tmp_path) as (one, other):
        other.count(5)
        await one.frames.frame()
        other.plane.call_statistics = CallStatistics()
        other.restart()
        other.count(2)
        await trio.sleep(1)
        await one.frames.frame()
        assert one.figures["requests"] == 7


async def test_an_idle_worker_sends_nothing_again(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with _workers(tmp_path) as (one, other):
        other.count(5)
        assert (await one.gathering.look()).parts[1]["counts"]
        await one.gathering.look()
        look = await one.gathering.look()
        assert (look.parts[1]["counts"], "rows" in look.parts[1], "lines" in look.parts[1]) == ([], False, False)


async def test_other_readers_keep_changes_for_frames(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with _workers(tmp_path) as (one, other):
        await one.frames.frame()
        for worker in (one, other):
            worker.count(3)
            await worker.plane.registry.apply(())
        assert (await one.gathering.rows())["echo"]["state"] == "unloaded"
        await one.gathering.fetch_history(LINES)
        await trio.sleep(1)
        frame = await one.frames.frame()
        assert (frame.services["echo"]["requests"], frame.services["echo"]["rate"]) == (6, 6)
        assert (frame.rows["echo"] or {})["state"] == "unloaded"
        await trio.sleep(1)
        assert (await one.frames.frame()).rows == {}


async def test_lines_of_all_workers_are_one_log_in_the_order_of_time(tmp_path: Path) -> None:
    async with _workers(tmp_path) as (one, other):
        for number in range(3):
            one.log(100.0 + number, f"a{number}")
            other.log(100.5 + number, f"b{number}")
        await one.lines()
        lines = [(each["number"], each["event"], each["worker"]) for each in await one.lines()]
        assert lines == [(1, "a0", 0), (2, "b0", 1), (3, "a1", 0), (4, "b1", 1), (5, "a2", 0), (6, "b2", 1)]
        other.log(200.0, "later")
        assert [each["event"] for each in await one.lines(6)] == ["later"]


async def test_lines_of_one_worker_keep_their_order_for_any_times(tmp_path: Path) -> None:
    async with stack(tmp_path, loader=load_pass_through) as (plane, _, _):
        alone = _Worker(plane, _Peers(0, {}))
        for at in (100.5, 100.0, 200.0, 50.0):
            alone.log(at, f"at {at}")
        lines = [(each["number"], each["at"], "worker" in each) for each in await alone.lines()]
        assert lines == [(1, 100.5, False), (2, 100.0, False), (3, 200.0, False), (4, 50.0, False)]
        assert await alone.lines(4) == []


async def test_long_logs_are_sent_in_batches_and_keep_their_order(tmp_path: Path) -> None:
    async with _workers(tmp_path) as (one, other):
        for number in range(400):
            other.log(100.0 + number, "b" * 1000)
        one.log(150.5, "a")
        with one.gathering.wanting(LINES):
            part = (await one.gathering.look()).parts[1]
        assert part["more_lines"] is True
        assert len(part["lines"]) < 300
        times = [each["at"] for each in await one.lines()]
        assert (len(times), times) == (401, sorted(times))


async def test_failures_of_all_workers_are_in_the_order_they_were_received(tmp_path: Path) -> None:
    event = CallEvent("echo", "1", "model", ApiInterface("KServe", "REST"), "ModelInfer")
    event.code, event.error = "ModelFailure", ModelFailure("it is broken")
    async with _workers(tmp_path) as (one, other):
        for worker in (other, one):
            worker.past.failures.call_failed(event)
        await one.gathering.fetch_history(FAILURES)
        failures = one.gathering.past.failures.since(0)
        assert [(each["worker"], each["message"]) for each in failures] == [(1, "it is broken"), (0, "it is broken")]


def _span(began: int, ended: int, parent: str = "") -> FinishedSpan:
    return FinishedSpan(f"{began:016x}", parent, f"span {began}", "server", began, ended, {})


async def test_spans_of_a_trace_of_several_workers_are_one_tree(tmp_path: Path) -> None:
    async with _workers(tmp_path) as (one, other):
        kept = [worker.plane.traces or RecentTraces() for worker in (one, other)]
        kept[0].keep(7, _span(1_000_000, 9_000_000))
        kept[1].keep(7, _span(2_000_000, 8_000_000, parent=f"{1_000_000:016x}"))
        kept[1].keep(8, _span(3_000_000, 4_000_000))
        assert [each.is_watched for each in kept] == [False, False]
        await one.gathering.fetch_history(TRACES)
        assert [each.is_watched for each in kept] == [False, True]
        first, second = one.gathering.past.traces
        assert (first["trace_id"][-1], second["trace_id"][-1]) == ("8", "7")
        assert (second["name"], second["spans"], second["milliseconds"]) == ("span 1000000", 2, 8.0)
        trace = await one.gathering.trace(second["trace_id"])
        assert [span["name"] for span in trace["tree"]] == ["span 1000000", "span 2000000"]
        with pytest.raises(NotFound, match="not found"):
            await one.gathering.trace("ff")


async def test_a_service_that_one_worker_cannot_load_is_degraded(tmp_path: Path) -> None:
    async with _workers(tmp_path, load_pass_through, load_version_1) as (one, other):
        for worker in (one, other):
            row = (await worker.gathering.look()).rows["echo"]
            assert (row["state"], row["reason"]) == ("degraded", "worker 1: the file is <b>broken</b> \udcff")
            assert [each["version"] for each in row["versions"]] == ["1", "2"]
        document = await one.gathering.document("echo")
        assert (document["state"], len(document["inputs"])) == ("degraded", 2)
        with pytest.raises(NotFound, match="nothing is served as 'none'"):
            await one.gathering.document("none")


@pytest.mark.parametrize(
    ("states", "state", "reason"),
    [
        (("ready", "ready"), "ready", ""),
        (("ready", "loading"), "degraded", "worker 1: loading"),
        (("loading", "failed"), "failed", "worker 0: loading; worker 1: failed"),
        (("unloaded", "unloaded"), "unloaded", ""),
    ],
)
def test_a_merged_row_has_the_state_of_all_workers(states: tuple[str, str], state: str, reason: str) -> None:
    row = {"name": "a", "kind": "model", "takes": [], "reason": "", "versions": []}
    merged = merge_rows({worker: {"a": row | {"state": each}} for worker, each in enumerate(states)})["a"]
    assert (merged["state"], merged["reason"]) == (state, reason)


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
    merged = merge_figures({0: _figures(10, 90), 1: _figures(40, 10)})
    node = merged["nodes"]["n"]
    assert (node["runs"], node["failures"], node["active"], node["seconds"]) == (100, 2, 4, 1.0)
    assert node["p50"] < HISTOGRAM_BOUNDS[10] * 1e3 < HISTOGRAM_BOUNDS[39] * 1e3 < node["p99"]
    assert (merged["streams"], merged["waiting"]) == ({"0": 100}, {"n": 2})
    assert sum(node["times"].values()) == 100 <= len(empty_histogram()) * 100


def test_facts_are_summed_joined_or_listed_by_worker() -> None:
    one = {"processes": [1], "requests that wait": 2, "streams": 1, "device": "CPU", "runs": "here"}
    other = {"processes": [2], "requests that wait": 3, "streams": 1, "device": "CPU", "runs": "there"}
    sequence = {"id": "7", "requests": 1}
    merged = merge_figures(
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


def _failed(worker: _Worker, code: str, node: str = "", message: str = "no") -> None:
    event = CallEvent("echo", "1", "model", ApiInterface("KServe", "REST"), "ModelInfer", code=code)
    event.node, event.reason = node, message
    worker.past.failures.call_failed(event)


async def test_failures_are_counted_by_service_error_and_node_of_all_workers(tmp_path: Path) -> None:
    async with _workers(tmp_path) as (one, other):
        for number in range(150):
            _failed(one, "InvalidRequest", message=f"shape {number}")
        _failed(other, "InvalidRequest", message="the last")
        _failed(other, "GraphFailure", "words")
        _failed(other, "GraphFailure", "upper")
        await one.gathering.fetch_history(FAILURES)
        groups = one.gathering.past.failure_groups
        counts = {(each["name"], each["code"], each["node"]): each["count"] for each in groups}
        assert counts == {
            ("echo", "InvalidRequest", ""): 151,
            ("echo", "GraphFailure", "words"): 1,
            ("echo", "GraphFailure", "upper"): 1,
        }
        assert [each["last"] for each in groups] == sorted((each["last"] for each in groups), reverse=True)
        (invalid,) = [each for each in groups if each["code"] == "InvalidRequest"]
        assert invalid["message"] == "the last"
        assert invalid["first"] <= invalid["last"]


async def test_the_groups_of_failures_are_limited(tmp_path: Path) -> None:
    async with _workers(tmp_path) as (one, _):
        for number in range(130):
            _failed(one, f"Error{number}")
        groups = one.past.failures.groups
        assert [each.code for each in groups] == [f"Error{number}" for number in range(129, 29, -1)]
