from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.isolation.side_messages import decode_samples
from ovmstrio.isolation.worker_process import RestartedProcess, WorkerExited, WorkerProcess
from ovmstrio.telemetry.log_levels import LOG_LEVEL
from ovmstrio.util.backoff import Backoff
from tests.support.scripted_worker import PROGRAM
from tests.support.waits import WAIT_SECONDS, until_async


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@asynccontextmanager
async def _started_worker(**options: Any) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(PROGRAM, **options)
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            assert (await process.start(nursery, "work"))[:2] == ["work", process.pid]
            try:
                yield process
            finally:
                await process.close(5)
    assert process.ended.is_set()
    with pytest.raises(ProcessLookupError):
        _signal(process, 0)


def _signal(process: WorkerProcess, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


@pytest.mark.parametrize("function", ["os.pipe", "packet_pair", "start_program"])
async def test_process_that_cannot_be_started_has_ended(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    process = WorkerProcess(PROGRAM)
    files = _descriptors()
    monkeypatch.setattr(f"ovmstrio.isolation.worker_process.{function}", refuse)
    async with trio.open_nursery() as nursery:
        with pytest.raises(OSError, match="Too many open files"):
            await process.start(nursery, "work")
    assert process.is_retired
    assert process.ended.is_set()
    assert _descriptors() == files


async def test_answers_arrive_in_any_order() -> None:
    async with _started_worker(max_concurrent_calls=3) as process:
        answers: list[str] = []

        async def ask(seconds: float, text: str) -> None:
            answers.append(await process.call(["late", seconds, text]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0.3, "last")
            nursery.start_soon(ask, 0, "first")
        large = np.arange(100_000)
        np.testing.assert_array_equal(await process.call(["echo", large]), large)
        assert answers == ["first", "last"]
    assert process.why == "ended with status 0"


async def test_calls_at_once_are_limited() -> None:
    async with _started_worker() as process:
        _signal(process, signal.SIGSTOP)
        with trio.move_on_after(0):
            await process.call(["echo", "for nobody"])
        with trio.move_on_after(0.01):
            await process.call(["echo", "for nobody"])
        assert process.is_busy
        _signal(process, signal.SIGCONT)
        assert await process.call(["echo", 1]) == 1
        assert not process.is_busy


async def test_message_with_a_descriptor_needs_no_answer() -> None:
    async with _started_worker() as process:
        reader, writer = os.pipe()
        await process.notify(None, writer)
        os.close(writer)
        await trio.lowlevel.wait_readable(reader)
        assert int(os.read(reader, 100)) == process.pid
        os.close(reader)


async def test_call_that_cannot_be_sent_raises_and_the_next_is_answered() -> None:
    async with _started_worker() as process:
        with pytest.raises(TypeError, match=r"not builtins\.object"):
            await process.call(["echo", object()])
        assert await process.call(["echo", 1]) == 1


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        (["die", signal.SIGSEGV.value], "was killed by SIGSEGV"),
        (["junk"], "sent an invalid message (ValueError("),
        (["twice"], "sent an invalid message (KeyError("),
    ],
)
async def test_end_of_a_process_fails_calls_and_profiles(deed: list[Any], why: str) -> None:
    async with _started_worker(max_concurrent_calls=2) as process:
        calls, profiles = list[WorkerExited](), list[WorkerExited]()

        async def run(ends: list[WorkerExited], operation: Callable[[], Awaitable[Any]]) -> None:
            try:
                await operation()
            except WorkerExited as end:
                ends.append(end)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, calls, partial(process.call, ["hang"]))
            nursery.start_soon(run, profiles, partial(process.sample, 60, 1))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(run, calls, partial(process.call, deed))
        await process.ended.wait()
        assert process.why.startswith(why)
        assert {end.why for end in calls} == {end.why for end in profiles} == {process.why}
        assert all(end.was_called for end in calls)
        with pytest.raises(WorkerExited) as caught:
            await process.call(["echo", 1])
        assert not caught.value.was_called
        with pytest.raises(WorkerExited):
            await process.notify(None)
        with pytest.raises(WorkerExited):
            await process.sample(0.01, 1)


@pytest.mark.parametrize(("mode", "status"), [("leave", 0), ("exit", 3)])
async def test_end_during_the_start_is_raised_once_the_end_was_handled(mode: str, status: int) -> None:
    buried = trio.Event()

    async def bury() -> None:
        buried.set()

    async with trio.open_nursery() as nursery:
        process = WorkerProcess(PROGRAM)
        with pytest.raises(WorkerExited, match=f"ended with status {status}"):
            await process.start(nursery, mode, on_exit=bury)
        assert process.status == status
    assert buried.is_set()


async def test_process_with_an_abandoned_call_is_killed_after_the_grace_period() -> None:
    stuck = trio.Event()
    async with (
        _started_worker(max_concurrent_calls=2, grace_seconds=0.05, on_stuck=stuck.set) as process,
        trio.open_nursery() as nursery,
    ):
        with trio.move_on_after(0.01):
            await process.call(["hang"])
        nursery.start_soon(process.call, ["hang"])
        await stuck.wait()
        assert process.is_retired
        assert not process.ended.is_set()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await process.ended.wait()
    assert process.why == "was killed because a call did not end within 0.05 s after its caller left"


async def test_process_ends_with_its_nursery() -> None:
    process = WorkerProcess(PROGRAM)
    async with trio.open_nursery() as nursery:
        _, pid, group = await process.start(nursery, "work")
        assert group == pid
        nursery.cancel_scope.cancel()
    assert process.status == -signal.SIGKILL


@pytest.mark.parametrize("_", range(6))
async def test_callers_may_be_cancelled_with_the_process(_: int) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            process = WorkerProcess(PROGRAM)
            await process.start(nursery, "work")
            async with trio.open_nursery() as asking:
                asking.start_soon(process.call, ["hang"])
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
    assert process.ended.is_set()


async def test_kept_process_is_restarted_until_it_stops() -> None:
    stopping, ends = trio.Event(), list[str]()
    make = partial(WorkerProcess, PROGRAM)
    reader, writer = os.pipe()
    kept = RestartedProcess(
        0, make, "work", writer, backoff=Backoff(0, 0), stopping=stopping,
        changed=lambda: None, ended=lambda _, process: ends.append(process.why),
    )  # fmt: skip
    pids = []
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.keep)
            for _ in range(2):
                await until_async(lambda: kept.is_ready)
                assert await kept.give(None, writer)
                await trio.lowlevel.wait_readable(reader)
                pids.append(int(os.read(reader, 100)))
                assert kept.given == 1
                if len(pids) == 1:
                    os.kill(pids[0], signal.SIGKILL)
                    await until_async(lambda: bool(ends))
            stopping.set()
            kept.dismiss()
    assert ends == ["was killed by SIGKILL", "ended with status 0"]
    assert not await kept.give(None, writer)
    assert pids[0] != pids[1]
    os.close(reader)
    os.close(writer)


async def test_error_of_the_end_callback_ends_the_restarts() -> None:
    def refuse(_: RestartedProcess, process: WorkerProcess) -> None:
        raise LookupError(process.why)

    with Path(os.devnull).open() as file:  # noqa: ASYNC230 - takes no time worth a thread
        kept = RestartedProcess(
            0, partial(WorkerProcess, PROGRAM), "leave", file.fileno(), backoff=Backoff(0, 0), stopping=trio.Event(),
            changed=lambda: None, ended=refuse,
        )  # fmt: skip
        with pytest.raises(LookupError, match="ended with status 0"):
            await kept.keep()
    assert kept.process is None


async def test_threads_are_sampled_during_a_call() -> None:
    async with _started_worker() as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.call, ["hang"])
        await trio.testing.wait_all_tasks_blocked()
        sampled = {threads.name: threads for threads in await process.sample(0.2, 100)}
        assert process.is_busy
        main = sampled["main thread"]
        assert main.samples == main.waiting + main.stacks.total() > 0
        assert await process.sample(0.01, 100)
        nursery.cancel_scope.cancel()


async def test_samples_of_a_cancelled_profile_are_ignored() -> None:
    async with _started_worker() as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.sample, 0.1, 100)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert await process.call(["late", 0.5, "asked"]) == "asked"
        assert await process.sample(0.01, 100)


async def test_concurrent_profiles_get_their_own_samples() -> None:
    async with _started_worker() as process:
        counts: dict[str, int] = {}

        async def sample(name: str, seconds: float, rate: float) -> None:
            counts[name] = next(each.samples for each in await process.sample(seconds, rate) if "main" in each.name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sample, "few", 0.5, 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(sample, "many", 0.2, 100)
    assert counts["few"] == 1
    assert counts["many"] >= 1


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        {},
        {"frames": [["a", "b"]], "threads": []},
        {"frames": [], "threads": [["a", 1, 1, None, [[[0], 1]]]]},
        {"frames": [["a", "b", float("inf")]], "threads": []},
    ],
)
def test_invalid_samples_are_refused(nonsense: Any) -> None:
    with pytest.raises(ValueError, match="malformed stack samples"):
        decode_samples(nonsense)


async def test_stopped_process_is_killed_and_its_calls_fail() -> None:
    async with _started_worker(stopped_seconds=0.4) as process:
        _signal(process, signal.SIGSTOP)
        with pytest.raises(WorkerExited, match=r"was stopped \(SIGSTOP\) for 0.4 s and was killed"):
            await process.call(["echo", 1])


async def test_process_that_is_continued_in_time_is_not_killed() -> None:
    async with _started_worker(stopped_seconds=2) as process:
        for number in range(3):
            _signal(process, signal.SIGSTOP)
            await trio.sleep(0.9)
            _signal(process, signal.SIGCONT)
            await trio.sleep(0.6)
            assert await process.call(["echo", number]) == number


async def test_time_in_which_the_server_itself_is_stopped_does_not_count() -> None:
    async with _started_worker(stopped_seconds=0.8) as process:
        for number in range(4):
            _signal(process, signal.SIGSTOP)
            time.sleep(1)  # noqa: ASYNC251 - nothing else may run
            await trio.sleep(0.3)
            _signal(process, signal.SIGCONT)
            assert await process.call(["echo", number]) == number


# Output


FILES = Path("/proc/self/fd")
NAMES = {"servable": "graph", "node": "counter"}


def _open_files() -> int:
    return len(list(FILES.iterdir()))


async def _log_of(*requests: list[Any]) -> list[Any]:
    with capture_logs() as logged, trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            process = WorkerProcess(PROGRAM, log_fields=NAMES)
            await process.start(nursery, "work")
            try:
                for request in requests:
                    await process.call(request)
            except WorkerExited:
                await process.ended.wait()
            await process.close(5)
    return [(line["stream"], line["event"]) for line in logged if line["node"] == "counter"]


async def test_lines_of_several_writes_are_logged() -> None:
    printed = await _log_of(["write", 1, "one\ntw"], ["write", 1, "o\n"], ["write", 1, "open"])
    assert printed == [("stdout", "one"), ("stdout", "two"), ("stdout", "open")]


async def test_output_of_a_crashed_process_is_logged_before_its_end_is_reported() -> None:
    assert await _log_of(["write", 2, "last words"], ["die", signal.SIGKILL]) == [("stderr", "last words")]


async def test_long_output_is_cut_and_delays_no_answer_forever() -> None:
    printed = await _log_of(["write", 1, "x" * 50_000 + "\n"], ["write", 1, "y\n" * 10_000], ["echo", 1])
    assert [len(printed), printed[0][1][:4], len(printed[0][1]) < 4200] == [10_001, "xxxx", True]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    root, handler = logging.getLogger(), _Records()
    level = root.level
    LOG_LEVEL.set(logging.INFO)
    root.addHandler(handler)
    yield handler.records
    root.removeHandler(handler)
    LOG_LEVEL.set(level)


async def test_log_records_arrive_with_their_fields_also_before_a_crash(records: list[logging.LogRecord]) -> None:
    fields = {"size": 7, "path": ["/data", None]}
    await _log_of(["log", logging.ERROR, "last words", fields], ["die", signal.SIGKILL])
    (record,) = records
    assert (record.name, record.levelname, record.getMessage()) == ("worker.code", "ERROR", "last words")
    assert (record.filename, record.funcName) == ("scripted_worker.py", "_handle")
    assert {name: vars(record)[name] for name in fields} == fields


async def test_a_log_record_larger_than_a_packet_loses_its_fields(records: list[logging.LogRecord]) -> None:
    fields = {f"field{number}": "x" * 4000 for number in range(50)}
    await _log_of(["log", logging.INFO, "large", fields])
    assert [record.getMessage() for record in records] == ["large"]
    assert not fields.keys() & vars(records[0]).keys()


async def test_log_levels_of_the_server_apply_to_running_processes(records: list[logging.LogRecord]) -> None:
    async with _started_worker(log_fields=NAMES) as process:
        for level in (logging.INFO, logging.DEBUG, logging.ERROR):
            LOG_LEVEL.set(level)
            for number in (logging.DEBUG, logging.WARNING):
                await process.call(["log", number, f"{number} at {level}", {}])
    assert [record.getMessage() for record in records] == ["30 at 20", "10 at 10", "30 at 10"]


async def test_a_process_whose_server_does_not_read_continues_and_counts_dropped_records(
    records: list[logging.LogRecord],
) -> None:
    """The test blocks the loop, so that the server reads nothing, until the process has logged 100 MB."""
    async with _started_worker(log_fields=NAMES) as process:
        read, write = os.pipe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(process.call, ["log", logging.INFO, "NUMBER " + "x" * 2000, {}, 50_000])
            await trio.testing.wait_all_tasks_blocked()
            await process.notify(None, write)
            os.close(write)
            assert select.select([read], [], [], WAIT_SECONDS)[0], "the process waits for its server"
            assert int(os.read(read, 100)) == process.pid
            os.close(read)
        await until_async(lambda: bool(records) and records[-1].getMessage() == "log records dropped")
        await process.call(["log", logging.INFO, "after", {}])
    *arrived, dropped, last = records
    numbers = [int(record.getMessage().split()[0]) for record in arrived]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    assert (dropped.levelname, vars(dropped)["count"], last.getMessage()) == ("WARNING", 50_000 - len(arrived), "after")


@pytest.mark.parametrize("names", [None, NAMES])
async def test_no_pipe_is_left_open(names: dict[str, str] | None) -> None:
    before = _open_files()
    async with trio.open_nursery() as nursery:
        process = WorkerProcess(PROGRAM, log_fields=names)
        await process.start(nursery, "work")
        await process.close(5)
    assert _open_files() == before


# Lifelines


_CODE = """
import sys
from ovmstrio.isolation.exit_status import exit_with_parent
sys.stdin.readline()
exit_with_parent(int(sys.argv[1]))
print("watches", flush=True)
while True: pass
"""


def test_busy_process_ends_with_its_lifeline() -> None:
    process, kept_open = _started()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "watches\n"
        assert process.poll() is None
        os.close(kept_open)
        assert process.wait(WAIT_SECONDS) == -signal.SIGIO


def test_process_ends_if_its_lifeline_ended_while_it_started() -> None:
    process, kept_open = _started()
    os.close(kept_open)
    assert process.communicate("go\n", timeout=WAIT_SECONDS)[0] == ""
    assert process.returncode == -signal.SIGIO


def _started() -> tuple[subprocess.Popen[str], int]:
    lifeline, kept_open = os.pipe()
    command = [sys.executable, "-c", _CODE, str(lifeline)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lifeline,), text=True)
    os.close(lifeline)
    return process, kept_open


# Async generators


_PROGRAM = """
import json, queue, sys, trio
from ovmstrio.isolation.code_host import AsyncGeneratorHost
from ovmstrio.isolation.code_host import LoopThread

loop, answers, replies = LoopThread(), queue.Queue(), []
alive = 0


async def generator():
    global alive
    alive += 1
    try:
        yield b"first"
        while True:
            await trio.sleep_forever()
            yield b"never"
    finally:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        alive -= 1


def host():
    return AsyncGeneratorHost(
        generator(), str, lambda *answer: answers.put(answer), None, loop=loop, ended=lambda: None
    )


def answer_of(number):
    while True:
        answered, value = answers.get(timeout=60)
        if answered == number:
            return value


for steps in sys.argv[1].split(","):
    made = host()
    for step in steps.split():
        match step:
            case "taken":
                made.pull(1)
                answer_of(1)
            case "pull":
                made.pull(2)
            case "answered":
                replies.append(answer_of(2))
            case "leave":
                made.leave(2)
            case "close":
                made.close(3)
                replies.append(answer_of(3))
print(json.dumps([alive, [each for each in replies if each]]))
"""


def _results(steps: list[str]) -> tuple[int, list[object]]:
    ran = subprocess.run(
        [sys.executable, "-c", dedent(_PROGRAM), ",".join(steps)], capture_output=True, check=True, timeout=60
    )
    alive, raised = json.loads(ran.stdout)
    return alive, raised


def test_close_waits_for_the_end_of_a_cancelled_step() -> None:
    assert _results(["taken pull leave close", "taken pull close"] * 50) == (0, [])


def test_generator_that_is_left_before_it_is_pulled_begins_no_step() -> None:
    steps = ["leave pull answered close", "taken leave pull answered close"]
    assert _results(steps) == (0, [[[], None], [[], None]])
