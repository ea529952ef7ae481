from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.ext.ops import CustomExceptionCode, PipelineRequest
from ovmstrio.ops.executor import Executor, PipelineSource, open_executor
from ovmstrio.ops.messages import from_array, to_array
from ovmstrio.ops.observing.hooks import NULL_HOOKS, OpHooks
from tests.support.ops import asking, infer_until_deadline
from tests.support.ops_processes import loaded
from tests.support.pipelines import gather
from tests.support.processes import is_at_work
from tests.support.waits import WAIT_SECONDS, until_async


@asynccontextmanager
async def opened(
    name: str, concurrency: int = 1, batch_size: int = 1, hooks: OpHooks = NULL_HOOKS, seconds: float = WAIT_SECONDS
) -> AsyncIterator[Executor]:
    pipeline, source = loaded(name, concurrency, batch_size)
    with trio.fail_after(seconds):
        async with open_executor(pipeline.graph, pipeline.settings, hooks=hooks, source=source) as executor:
            yield executor


async def infer(executor: Executor, text: str = "x") -> list[str]:
    """Return the worker's number, the id of its process and its count of requests."""
    response = await executor.infer(asking(text))
    assert response.err_no == 0, response.err_msg
    return response.values[0].split()


class _Recorder(OpHooks):
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.died = trio.Event()
        self.batches: Counter[int] = Counter()

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        self.reasons.append(reason)
        self.died.set()

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        self.batches[len(data_ids)] += 1


def is_alive(pid: str) -> bool:
    return Path("/proc", pid).exists()


async def test_workers_are_processes_that_end_with_the_pipeline() -> None:
    async with opened("Acting", concurrency=2) as executor:
        answers = await gather(partial(infer, executor), ["x"] * 8)
        pids = {pid for _, pid, _ in answers}
    assert {number for number, _, _ in answers} <= {"0", "1"}
    assert str(os.getpid()) not in pids
    assert len({(number, pid) for number, pid, _ in answers}) == len(pids)
    assert not any(is_alive(pid) for pid in pids)
    assert len({(pid, count) for _, pid, count in answers}) == 8


@pytest.mark.parametrize(
    ("deed", "why"),
    [("die", "was killed by SIGKILL"), ("exit", "ended with status 3"), ("junk", "sent an invalid message")],
)
async def test_a_worker_that_dies_costs_only_its_own_request(deed: str, why: str) -> None:
    hooks = _Recorder()
    async with opened("Acting", hooks=hooks) as executor:
        before = await infer(executor)
        response = await executor.infer(asking(deed))
        assert response.err_no == CustomExceptionCode.UNKNOW.value
        assert why in response.err_msg
        assert (await infer(executor))[1] != before[1]
        assert not is_alive(before[1])
        assert executor.unready_reason() == ""
    (reason,) = hooks.reasons
    assert why in reason


async def test_an_idle_worker_that_dies_is_replaced() -> None:
    hooks = _Recorder()
    async with opened("Acting", hooks=hooks) as executor:
        before = await infer(executor)
        os.kill(int(before[1]), signal.SIGKILL)
        await hooks.died.wait()
        assert (await infer(executor))[1] != before[1]
    assert hooks.reasons == ["was killed by SIGKILL"]


async def test_a_dead_worker_is_noticed_while_its_child_holds_the_socket(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with opened("Acting") as executor:
        before = await infer(executor)
        response = await executor.infer(asking(f"orphan:{file}"))
        assert response.err_no == CustomExceptionCode.UNKNOW.value
        assert "was killed by SIGKILL" in response.err_msg
        assert (await infer(executor))[1] != before[1]
    await until_async(lambda: not is_at_work(int(file.read_text())))


async def test_a_hook_that_raises_system_exit_ends_no_process() -> None:
    async with opened("Acting") as executor:
        before = await infer(executor)
        assert (await executor.infer(asking("leave"))).err_no == 10000
        assert (await infer(executor))[1] == before[1]


async def test_an_output_that_cannot_be_sent_fails_alone() -> None:
    hooks = _Recorder()
    async with opened("Acting", batch_size=2, hooks=hooks) as executor:
        wrong, fine = await gather(executor.infer, [asking("object"), asking("fine")])
    assert hooks.batches == {2: 1}
    assert wrong.err_no == 7000
    assert "not threading.Event" in wrong.err_msg
    assert fine.values[0].startswith("0 ")


async def test_a_process_with_a_stuck_hook_is_replaced(
    mock_clock: trio.testing.MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.ops.executor.workers.GRACE_SECONDS", 0.05)
    started = tmp_path / "started"
    mock_clock.rate = 1
    async with opened("Acting", seconds=2000) as executor:
        before = await infer(executor)
        response = await infer_until_deadline(executor, started.exists, mock_clock, f"wait:{started}")
        assert response.err_no == 6000
        assert (await infer(executor))[1] != before[1]
        assert not is_alive(before[1])


async def test_a_process_with_a_late_thread_serves_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened("Stuck") as executor:
        before = (await executor.infer(asking())).values
        for _ in range(2):
            assert (await executor.infer(asking("wait"))).err_no == 6000
            assert (await executor.infer(asking())).values == before
        monkeypatch.setattr("ovmstrio.ops.executor.workers.GRACE_SECONDS", 0.05)


def shared_files() -> int:
    """Count the open memory files of this process; names in shared memory may be of other tests."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += "memfd" in str(path.readlink())
    return count


async def test_large_arrays_are_sent_by_shared_memory() -> None:
    before = shared_files()
    pipeline, source = loaded("Arrays")
    pipeline.graph.response.set_pack_format(True)
    array = np.arange(500_000, dtype=np.float32)
    async with open_executor(pipeline.graph, pipeline.settings, source=source) as executor:
        for _ in range(3):
            response = await executor.infer(PipelineRequest(tensors=[from_array("x", array)]))
            arrays = {tensor.name: to_array(tensor) for tensor in response.tensors}
            np.testing.assert_array_equal(arrays["x"], (array + 1) * 2)
            assert arrays["small"].dtype == np.int16
            assert (arrays["small"].tolist(), arrays["texts"]) == ([0, 1, 2], "ab")
    assert shared_files() == before


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("Failing", loaded("Failing")[1], "(?s)worker 0 of Op op cannot be started.*no such dictionary"),
        ("Exiting", loaded("Exiting")[1], "(?s)worker 0 of Op op cannot be started.*its process ended with status 7"),
        ("Acting", None, "is_thread_op: true"),
        ("Acting", PipelineSource("builtins:str", "x"), "should return LoadedPipeline, got str"),
    ],
    ids=["init_op raises", "its process ends", "no source", "wrong source"],
)
async def test_a_worker_that_cannot_be_started_ends_the_start(
    name: str, source: PipelineSource | None, message: str
) -> None:
    pipeline, _ = loaded(name)
    with pytest.raises(ConfigError, match=message):
        async with open_executor(pipeline.graph, pipeline.settings, source=source):
            raise AssertionError("it was opened")
