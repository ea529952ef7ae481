from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from ovmstrio.core.errors import ConfigError, ModelFailure, NotReady
from ovmstrio.models.sequences.requests import owner_index
from ovmstrio.models.sequences.store import check_worker_count, worker_folder
from ovmstrio.server.reload import RELOAD, RESTORE, Reloader
from ovmstrio.serving.aggregate import aggregate_metrics, aggregate_sequences, aggregate_statistics
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.interfaces import KSERVE_REST
from ovmstrio.workers.shared_state import RetainedMetrics

# Reloads


SECONDS = 60


class _Process:
    """A worker that reloads once the workers that it needs have begun, and may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.needs: list[_Process] = []
        self.begun = trio.Event()
        self.made: list[str] = []
        self._fails = fails

    def failed_versions(self) -> list[list[Any]]:
        return [["m", 1]] if self._fails else []

    async def reload(self) -> bool:
        await self._make("reload")
        if self._fails:
            raise ModelFailure("bad")
        return True

    async def restore(self) -> None:
        await self._make("restore")

    async def _make(self, what: str) -> None:
        self.begun.set()
        for each in self.needs:
            await each.begun.wait()
        self.made.append(what)
        # The other worker goes on first.
        await trio.lowlevel.checkpoint()


class _Other:
    def __init__(self, other: _Process) -> None:
        self._other = other

    async def call_all(self, question: str, *_: Any, limit_seconds: float = 60) -> list[Any]:
        assert limit_seconds > SECONDS
        there = Reloader(cast("Any", self._other), cast("Any", self._other), cast("Any", _Notifier()), None)
        return [await {RELOAD: there.reload_for_peer, RESTORE: there.rollback_here}[question]()]

    async def run_locked(self, work: Callable[[], Awaitable[bool]]) -> bool:
        return await work()


class _Notifier:
    reloading = nullcontext


def _reloading(here: _Process, other: _Process) -> Reloader:
    return Reloader(cast("Any", here), cast("Any", here), cast("Any", _Notifier()), cast("Any", _Other(other)))


async def test_workers_reload_concurrently() -> None:
    here, other = _Process(), _Process()
    here.needs, other.needs = [other], [here]
    with trio.fail_after(SECONDS):
        assert await _reloading(here, other).reload()
    assert (here.made, other.made) == (["reload"], ["reload"])


@pytest.mark.parametrize("fails_here", [True, False])
async def test_all_workers_restore_if_one_fails_to_reload(*, fails_here: bool) -> None:
    here, other = _Process(fails=fails_here), _Process(fails=not fails_here)
    here.needs, other.needs = [other], [here]
    with trio.fail_after(SECONDS), pytest.raises(ModelFailure, match="bad"):
        await _reloading(here, other).reload()
    assert (here.made, other.made) == (["reload", "restore"], ["reload", "restore"])


async def test_workers_keep_a_reload_in_which_the_same_service_fails_in_all() -> None:
    here, other = _Process(fails=True), _Process(fails=True)
    with pytest.raises(ModelFailure, match="bad"):
        await _reloading(here, other).reload()
    assert (here.made, other.made) == (["reload"], ["reload"])


# Metrics


ROWS = 3


def _text(count: int) -> bytes:
    counter = b"# HELP calls Calls.\n# TYPE calls counter\ncalls %d.0\n" % count
    return counter + b"# HELP now Now.\n# TYPE now gauge\nnow 1.0\n"


@pytest.fixture
def metrics() -> RetainedMetrics:
    return RetainedMetrics(memoryview(bytearray(RetainedMetrics.size(ROWS))), ROWS)


class _Peers:
    def __init__(self, metrics: RetainedMetrics, answers: dict[int, bytes]) -> None:
        self._metrics = metrics
        self._answers = answers
        self.others = [1, 2]
        self.ends: int | None = None

    async def call_within(self, *_: Any) -> dict[int, bytes]:
        answers = dict(self._answers)
        if self.ends is not None:
            self._metrics.retain(self.ends)
            self._answers.pop(self.ends, None)
            self.ends = None
        await trio.lowlevel.checkpoint()
        return answers

    def save_metrics(self, text: bytes, *, is_open: bool) -> None:
        self._metrics.save(0, text, is_open=is_open)

    def metrics_generation(self, *, is_open: bool) -> int | None:
        return self._metrics.generation(is_open=is_open)

    def retained_metrics(self, answered: Iterable[int], *, is_open: bool) -> list[bytes]:
        return self._metrics.texts([row for row in (1, 2) if row not in answered], is_open=is_open)


class _Plane:
    def __init__(self, peers: _Peers) -> None:
        self.peers = peers

    def render_metrics(self, *_: Any, **__: Any) -> bytes:
        return _text(1)


async def _calls(peers: _Peers) -> list[bytes]:
    text = await aggregate_metrics(cast("DataPlane", _Plane(peers)), (), trio.CapacityLimiter(1))
    assert text is not None
    return [line for line in text.splitlines() if not line.startswith(b"#")]


async def test_metrics_of_a_silent_worker_are_counted_before_its_end_is_known(metrics: RetainedMetrics) -> None:
    metrics.save(1, _text(10), is_open=False)
    metrics.save(2, _text(100), is_open=False)
    peers = _Peers(metrics, {2: _text(101)})
    assert await _calls(peers) == [b"calls 112.0", b"now 2.0"]
    metrics.retain(1)
    assert await _calls(peers) == [b"calls 112.0", b"now 2.0"]


async def test_counters_of_a_stuck_worker_keep_their_last_values(metrics: RetainedMetrics) -> None:
    answers = {1: _text(10), 2: _text(100)}
    for row, text in answers.items():
        metrics.save(row, text, is_open=False)
    assert await _calls(_Peers(metrics, answers)) == [b"calls 111.0", b"now 3.0"]
    assert await _calls(_Peers(metrics, {1: _text(11)})) == [b"calls 112.0", b"now 2.0"]
    assert await _calls(_Peers(metrics, {1: _text(11), 2: _text(102)})) == [b"calls 114.0", b"now 3.0"]


async def test_worker_that_ends_during_a_scrape_is_counted_once(metrics: RetainedMetrics) -> None:
    metrics.save(2, _text(101), is_open=False)
    peers = _Peers(metrics, {2: _text(101)})
    peers.ends = 2
    assert await _calls(peers) == [b"calls 102.0", b"now 1.0"]


def test_metrics_of_ended_workers_are_unavailable_while_they_change(
    metrics: RetainedMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.save(1, _text(10), is_open=True)
    seen: list[int | None] = []
    leave = metrics.save

    def note(row: int, text: bytes, *, is_open: bool) -> None:
        seen.append(metrics.generation(is_open=is_open))
        leave(row, text, is_open=is_open)

    monkeypatch.setattr(metrics, "save", note)
    before = metrics.generation(is_open=True)
    metrics.retain(1)
    assert seen == [None, None]
    assert None is not metrics.generation(is_open=True) != before


# Stored sequences


def test_store_of_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    check_worker_count(tmp_path / "none", 2)
    for row in range(2):
        part = worker_folder(tmp_path, row, 2)
        part.mkdir()
        (part / "sequences.bin").touch()
    check_worker_count(tmp_path, 2)
    for rows in (1, 3):
        with pytest.raises(ConfigError, match="--workers 2"):
            check_worker_count(tmp_path, rows)


def test_store_of_one_process_is_refused_by_several(tmp_path: Path) -> None:
    (tmp_path / "sequences.bin").touch()
    check_worker_count(tmp_path, 1)
    with pytest.raises(ConfigError, match="--workers 1"):
        check_worker_count(tmp_path, 2)


@given(st.integers(1, 2**64 - 1) | st.text(min_size=1, max_size=256), st.integers(1, 64))
def test_id_has_one_owner(identity: int | str, processes: int) -> None:
    found = owner_index(identity, processes)
    assert 0 <= found < processes
    assert owner_index(identity, processes) == found


def test_consecutive_ids_are_spread_over_owners() -> None:
    owners = [owner_index(identity, 4) for identity in range(1, 1001)]
    assert all(200 < owners.count(row) < 300 for row in range(4))


class _StuckPeers:
    async def call_all(self, *_: Any, limit_seconds: float = 60) -> list[Any]:
        await trio.sleep(limit_seconds)
        raise NotReady("workers 1 of 2 timed out")


@pytest.mark.parametrize("aggregate", [aggregate_statistics, aggregate_sequences])
async def test_a_stuck_worker_delays_a_query_by_5_seconds(
    aggregate: Callable[..., Awaitable[object]], autojump_clock: MockClock
) -> None:
    plane: Any = SimpleNamespace(peers=_StuckPeers(), statistics=lambda *_: [], sequences=lambda *_: [])
    with pytest.raises(NotReady, match="workers 1 of 2"):
        await aggregate(plane, "m", "", KSERVE_REST)
    assert trio.current_time() == 5
