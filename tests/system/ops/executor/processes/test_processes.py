from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.ops import CustomExceptionCode, PipelineRequest, PipelineResponse, PipelineTensor
from ovmstrio.runtimes.ops.executor import Executor, PipelineSource, open_executor
from ovmstrio.runtimes.ops.observing.hooks import NULL, OpHooks, Several
from ovmstrio.runtimes.ops.tensors import from_array, to_array
from tests.support.ops import asking, infer_until_deadline, settings, single
from tests.support.ops_processes import Told, loaded
from tests.support.waits import WAIT_SECONDS


@asynccontextmanager
async def opened(
    name: str, concurrency: int = 1, batch_size: int = 1, hooks: OpHooks = NULL, seconds: float = WAIT_SECONDS
) -> AsyncIterator[Executor]:
    """Open a pipeline whose Op is in processes; none of them takes long."""
    pipeline, source = loaded(name, concurrency, batch_size)
    with trio.fail_after(seconds):
        async with open_executor(pipeline.graph, pipeline.settings, hooks=hooks, source=source) as executor:
            yield executor


def parts(response: PipelineResponse) -> list[str]:
    """Give the worker's number, its process and its count."""
    assert response.err_no == 0, response.err_msg
    return response.values[0].split()


class Deaths(Several):
    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self.died = trio.Event()
        self.batches: Counter[int] = Counter()

    def worker_died(self, op: str, worker: int, reason: str) -> None:
        self.reasons.append(reason)
        self.died.set()

    def batch(self, op: str, worker: int, data_ids: Sequence[int]) -> None:
        self.batches[len(data_ids)] += 1


def is_alive(pid: str) -> bool:
    """Tell whether there is such a process."""
    return Path("/proc", pid).exists()


async def test_workers_are_processes_of_their_own() -> None:
    """Each knows its number, keeps its own state and its own process, and ends with the pipeline."""
    async with opened("Told", concurrency=2) as executor:
        answers: list[list[str]] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.append(parts(await executor.infer(asking())))

            for _ in range(8):
                nursery.start_soon(ask)
        pids = {pid for _, pid, _ in answers}
    assert {number for number, _, _ in answers} <= {"0", "1"}
    assert str(os.getpid()) not in pids
    assert len({(number, pid) for number, pid, _ in answers}) == len(pids)
    assert not any(is_alive(pid) for pid in pids)
    assert len({(pid, count) for _, pid, count in answers}) == 8


@pytest.mark.parametrize(
    ("deed", "why"), [("die", "was killed by SIGKILL"), ("exit", "ended with status 3"), ("junk", "is no answer")]
)
async def test_a_worker_that_dies_costs_only_its_own_request(deed: str, why: str) -> None:
    """That one is answered with 10000 and the reason, and the next one gets a new process."""
    hooks = Deaths()
    async with opened("Told", hooks=hooks) as executor:
        before = parts(await executor.infer(asking()))
        response = await executor.infer(asking(deed))
        assert response.err_no == CustomExceptionCode.UNKNOW.value
        assert why in response.err_msg
        after = parts(await executor.infer(asking()))
        assert after[1] != before[1]
        assert not is_alive(before[1])
        assert executor.obstacle() == ""
    (reason,) = hooks.reasons
    assert why in reason


async def test_a_worker_that_dies_while_it_is_idle_is_replaced() -> None:
    """No request notices it."""
    hooks = Deaths()
    async with opened("Told", hooks=hooks) as executor:
        before = parts(await executor.infer(asking()))
        os.kill(int(before[1]), signal.SIGKILL)
        await hooks.died.wait()
        assert parts(await executor.infer(asking()))[1] != before[1]
    assert hooks.reasons == ["was killed by SIGKILL"]


async def test_a_worker_that_dies_is_noticed_though_its_own_child_lives_on(tmp_path: Path) -> None:
    """Its end of the socket is not closed then, and its request ends all the same, as does the pipeline."""
    file = tmp_path / "pid"
    try:
        async with opened("Told") as executor:
            before = parts(await executor.infer(asking()))
            with trio.fail_after(WAIT_SECONDS):
                response = await executor.infer(asking(f"orphan:{file}"))
            assert response.err_no == CustomExceptionCode.UNKNOW.value
            assert "was killed by SIGKILL" in response.err_msg
            assert parts(await executor.infer(asking()))[1] != before[1]
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


async def test_a_hook_that_raises_system_exit_ends_no_process() -> None:
    """It is a failure of the request as any other."""
    async with opened("Told") as executor:
        before = parts(await executor.infer(asking()))
        assert (await executor.infer(asking("leave"))).err_no == 10000
        assert parts(await executor.infer(asking()))[1] == before[1]


async def test_an_output_that_cannot_be_sent_fails_alone() -> None:
    """The message names the type; other samples of its batch get their answers."""
    hooks = Deaths()
    async with opened("Told", batch_size=2, hooks=hooks) as executor, trio.open_nursery() as nursery:
        answers: dict[str, PipelineResponse] = {}

        async def ask(text: str) -> None:
            answers[text] = await executor.infer(asking(text))

        nursery.start_soon(ask, "object")
        nursery.start_soon(ask, "fine")
    assert hooks.batches == {2: 1}
    assert answers["object"].err_no == 7000
    assert "not threading.Event" in answers["object"].err_msg
    assert parts(answers["fine"])[0] == "0"


async def test_a_caller_that_leaves_a_hook_that_never_ends_costs_a_process(
    mock_clock: trio.testing.MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is replaced after a while, and the next request is answered."""
    monkeypatch.setattr("ovmstrio.runtimes.ops.executor.processes.process_worker.GRACE_SECONDS", 0.05)
    started = tmp_path / "started"
    mock_clock.rate = 1
    async with opened("Told", seconds=2000) as executor:
        before = parts(await executor.infer(asking()))
        response = await infer_until_deadline(executor, started.exists, mock_clock, f"wait:{started}")
        assert response.err_no == 6000
        assert parts(await executor.infer(asking()))[1] != before[1]
        assert not is_alive(before[1])


async def test_a_worker_whose_process_is_late_serves_the_next_request_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In another thread of the same worker process, so that nobody waits for one that may never end."""
    async with opened("Stuck") as executor:
        before = (await executor.infer(asking())).values
        for _ in range(2):
            assert (await executor.infer(asking("wait"))).err_no == 6000
            assert (await executor.infer(asking())).values == before
        monkeypatch.setattr("ovmstrio.runtimes.ops.executor.processes.process_worker.GRACE_SECONDS", 0.05)


def tensor_request(array: Any) -> PipelineRequest:
    """Make a request of one array."""
    tensor: PipelineTensor = from_array("x", array)
    return PipelineRequest(tensors=[tensor])


def shared_files() -> int:
    """Count the memory files that this process has open; what has a name in shared memory may be other tests'."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += "memfd" in str(path.readlink())
    return count


async def test_large_arrays_go_by_shared_memory() -> None:
    """They arrive whole and can be changed, and nothing is left of them in shared memory."""
    before = shared_files()
    pipeline, source = loaded("Arrays")
    pipeline.graph.response.set_pack_format(True)
    array = np.arange(500_000, dtype=np.float32)
    async with open_executor(pipeline.graph, pipeline.settings, source=source) as executor:
        for _ in range(3):
            response = await executor.infer(tensor_request(array))
            arrays = {tensor.name: to_array(tensor) for tensor in response.tensors}
            np.testing.assert_array_equal(arrays["x"], (array + 1) * 2)
            assert arrays["small"].dtype == np.int16
            assert (arrays["small"].tolist(), arrays["texts"]) == ([0, 1, 2], "ab")
    assert shared_files() == before


@pytest.mark.parametrize(
    ("name", "why"), [("Unprepared", "no such dictionary"), ("Dead", "its process ended with status 7")]
)
async def test_a_worker_that_cannot_be_started_ends_the_start(name: str, why: str) -> None:
    """The error tells which worker of which Op, and why, with the traceback of what was raised."""
    with pytest.raises(ConfigError, match=r"worker 0 of Op op cannot be started") as caught:
        async with opened(name):
            raise AssertionError("it was opened")
    assert why in str(caught.value)


async def test_processes_need_a_source() -> None:
    """Without one the start ends with the way out."""
    with pytest.raises(ConfigError, match="is_thread_op: true"):
        async with open_executor(single(Told), settings(is_thread_op=False)):
            raise AssertionError("it was opened")


async def test_a_loader_that_gives_nothing_is_refused() -> None:
    """The message tells what it should have given."""
    pipeline, _ = loaded("Told")
    source = PipelineSource("builtins:str", "x")
    with pytest.raises(ConfigError, match="should return LoadedPipeline, got str"):
        async with open_executor(pipeline.graph, pipeline.settings, source=source):
            raise AssertionError("it was opened")
