from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.core.errors import NotReady
from ovmstrio.graphs.calculator import NodeFailure
from ovmstrio.isolation import isolated_code
from ovmstrio.isolation.isolated_code import CodeWorker, IsolatedCode, Isolation
from ovmstrio.isolation.worker_process import WorkerExited
from tests.support.graph_nodes import Node, Nodes, Opened, make_node, nodes
from tests.support.graphs import handler
from tests.support.processes import is_at_work
from tests.support.scripted_worker import PROGRAM
from tests.support.waits import WAIT_SECONDS, until_async

MEMORY_LIMIT = 400 * 2**20
SOURCE = """
import ctypes, os, re, signal, time
class OvmsPythonModel:
    def execute(self, inputs):
        return self.stream(bytes(inputs[0])) if {is_stream} else self.once(bytes(inputs[0]))
    def stream(self, action):
        yield [Tensor("out", b"first")]
        self.do(action)
        yield [Tensor("out", b"second")]
    def once(self, action):
        self.do(action)
        return [Tensor("out", b"%d" % os.getpid())]
    def do(self, action):
        match action:
            case b"segfault":
                ctypes.string_at(0)
            case b"abort":
                os.abort()
            case b"exit":
                os._exit(3)
            case b"close":
                os.closerange(3, 4096)
            case b"close all":
                os.closerange(0, 4096)
            case b"close and open":
                os.closerange(3, 4096)
                self.files = [open(os.devnull, "w") for _ in range(50)]
            case b"loop":
                while True:
                    pass
            case b"lock":
                re.match("(a+)+$", "a" * 40 + "b")
            case b"grow":
                self.kept = []
                while True:
                    self.kept.append(b"x" * 2**24)
                    time.sleep(0.01)
            case b"fork":
                if not os.fork():
                    signal.pause()
"""
ACTIONS = {
    "segfault": "the worker process of the node was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
    "exit": "ended with status 3",
    "close": "its code has closed the descriptor of the channel",
    "close all": "its code has closed the descriptor",
    "close and open": "its code has closed the descriptor",
    "loop": "was killed because a call did not end within 1.5 s",
    "lock": "was killed because a call did not end within 1.5 s",
    "grow": "bytes of memory; its limit is 419430400",
}
LATE = {False: "lock", True: "loop"}
"""Deeds that last until the limit of a call: one for calls, the other for streams."""
MODES = pytest.mark.parametrize("is_stream", [False, True])


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    yield
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


async def load(made: Nodes, *, is_stream: bool) -> Node:
    made.write("handler.py", "from pyovms import Tensor\n" + SOURCE.format(is_stream=is_stream))
    return await made.load(make_node(generative=is_stream))


@asynccontextmanager
async def calls_of_another_node(made: Nodes) -> AsyncIterator[None]:
    made.write("other.py", "from pyovms import Tensor\n" + SOURCE.format(is_stream=False))
    other = await made.load(make_node("other.py", name="other"))
    ended = 0

    async def call() -> None:
        nonlocal ended
        while True:
            with trio.fail_after(WAIT_SECONDS):
                await other.run_once()
            ended += 1
            await trio.sleep(0.02)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        yield
        before = ended
        await until_async(lambda: ended > before)
        nursery.cancel_scope.cancel()


async def run_to_the_end(opened: Opened, action: str) -> None:
    call = await opened.run(action.encode())
    while call.loopback is not None:
        call = await opened.again(call.loopback)


@MODES
@pytest.mark.parametrize("is_late", [False, True])
async def test_crash_fails_only_its_call(tmp_path: Path, is_late: bool, is_stream: bool) -> None:
    isolation = Isolation(limit_seconds=1.5 if is_late else 30, memory_limit=MEMORY_LIMIT)
    async with nodes(tmp_path, isolation=isolation) as made, calls_of_another_node(made):
        node = await load(made, is_stream=is_stream)
        for action, reason in ACTIONS.items():
            if (action != LATE[is_stream]) if is_late else (action in LATE.values()):
                continue
            before = node.resources.code.code.pids
            with capture_logs() as logs, trio.fail_after(WAIT_SECONDS):
                with pytest.raises(NodeFailure) as raised:
                    async with node.opened() as opened:
                        await run_to_the_end(opened, action)
                assert reason in raised.value.message
                async with node.opened() as opened:
                    await run_to_the_end(opened, "")
                assert node.resources.code.code.pids != before
            assert "worker process exited" in [entry["event"] for entry in logs]


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("os.closerange(3, 4096)", "the event loop of its async code failed|has closed the descriptor"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("while True: pass", "was killed because a call did not end within 1.5 s"),
    ],
)
async def test_crash_of_async_code_fails_only_its_call(tmp_path: Path, action: str, reason: str) -> None:
    body = f"""
    if inputs[0].size:
        await trio.sleep(0)
        {action}
        await trio.sleep(0.1)
    return []
    """
    source = handler(body, prefix="async ", head="import os, signal, trio")
    async with nodes(tmp_path, isolation=Isolation(limit_seconds=1.5)) as made, calls_of_another_node(made):
        node = await made.load(source=source)
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            with pytest.raises(NodeFailure, match=reason):
                await node.run_once(b"x")
            assert await node.run_once() == []


async def test_process_without_descriptors_is_replaced(tmp_path: Path) -> None:
    body = """
    if inputs[0].size == 1:
        self.kept = []
        try:
            while True:
                self.kept.append(os.dup(1))
        except OSError:
            pass
    return [Tensor("out", b"%d" % inputs[0].size)]
    """
    source = handler(body, head="import os")
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(source=source)
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            assert await node.run_once(b"x") == [(0, "out", "1")]
            with pytest.raises(NodeFailure, match="out of file descriptors or memory"):
                await node.run_once(bytes(10**6))
            assert await node.run_once(bytes(10**6)) == [(0, "out", "1000000")]


@pytest.mark.parametrize("action", ["segfault", "loop"])
async def test_other_processes_of_the_node_continue(tmp_path: Path, action: str) -> None:
    isolation = Isolation(processes=2, limit_seconds=2)
    async with nodes(tmp_path, isolation=isolation) as made:
        node = await load(made, is_stream=False)
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail, node, action)
                for _ in range(50):
                    await node.run_once()


async def fail(node: Node, action: str) -> None:
    with pytest.raises(NodeFailure):
        await node.run_once(action.encode())


async def test_forked_child_ends_with_its_process(tmp_path: Path) -> None:
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await load(made, is_stream=False)
        ((_, _, pid),) = await node.run_once(b"fork")
        (child,) = psutil.Process(int(pid)).children()
        await until_async(lambda: not [each for each in child.net_connections("unix") if each.type == 5])
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            await fail(node, "segfault")
            await node.run_once()
        await until_async(lambda: not is_at_work(child.pid))


async def test_forked_child_that_returns_ends(tmp_path: Path) -> None:
    source = handler("self.child = os.fork()\nreturn [Tensor('out', b'%d' % self.child)]", head="import os")
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await made.load(source=source)
        for _ in range(3):
            ((_, _, child),) = await node.run_once()
            assert int(child)
            await until_async(lambda: not is_at_work(int(child)))  # noqa: B023 - awaited here


@pytest.mark.parametrize("action", ["loop", "lock"])
async def test_call_of_a_disconnected_client_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(isolated_code, "GRACE_SECONDS", 0.3)
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await load(made, is_stream=False)
        before = node.resources.code.code.pids
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            with trio.move_on_after(0.2) as scope:
                await node.run_once(action.encode())
            assert scope.cancelled_caught
            await until_async(lambda: node.resources.code.code.pids not in ([], before))
            await node.run_once()


async def test_node_that_holds_the_interpreter_is_unloaded(tmp_path: Path) -> None:
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await load(made, is_stream=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run_once, b"lock")
            await trio.testing.wait_all_tasks_blocked(0.1)
            nursery.cancel_scope.cancel()
        (pid,) = node.resources.code.code.pids
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            await node.resources.aclose()
        assert not is_at_work(pid)


async def test_failed_restart_is_reported_until_the_file_is_valid(tmp_path: Path) -> None:
    async with nodes(tmp_path, isolation=Isolation()) as made:
        node = await load(made, is_stream=False)
        (tmp_path / "handler.py").write_text("raise ValueError('broken meanwhile')")
        with capture_logs(), trio.fail_after(WAIT_SECONDS):
            await fail(node, "segfault")
            with pytest.raises(NotReady, match="cannot be started again: broken meanwhile"):
                await node.run_once()
            made.write("handler.py", "from pyovms import Tensor\n" + SOURCE.format(is_stream=False))
            await until_async(lambda: node.resources.code.code.pids)
            await node.run_once()


@pytest.mark.parametrize("action", ["", "lock"])
def test_process_ends_with_its_server(tmp_path: Path, action: str) -> None:
    program = f"""
    import trio
    from pathlib import Path
    from ovmstrio.extras import add_compat_path
    add_compat_path()
    from ovmstrio.isolation.isolated_code import Isolation
    from tests.system.graphs.python_nodes.test_isolated_crashes import load
    from tests.support.graph_nodes import nodes
    async def main():
        async with nodes(Path({str(tmp_path)!r}), isolation=Isolation()) as made:
            node = await load(made, is_stream=False)
            print(*node.resources.code.code.pids, flush=True)
            await node.run_once({action.encode()!r})
            await trio.sleep_forever()
    trio.run(main)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]) as server:
        assert server.stdout is not None
        worker = psutil.Process(int(server.stdout.readline()))
        if action:
            while worker.cpu_times().user < 0.5:
                assert server.poll() is None
        os.kill(server.pid, signal.SIGKILL)
        worker.wait(WAIT_SECONDS)


async def test_a_process_with_a_malformed_first_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_code, "_PROGRAM", PROGRAM)

    async def prepare(worker: CodeWorker) -> None:
        raise AssertionError(worker)

    code = IsolatedCode(Isolation(), "no.module:function", None, prepare=prepare, names={})
    with trio.fail_after(WAIT_SECONDS), pytest.raises(WorkerExited) as raised:
        await code.run()
    assert raised.value.why.startswith("sent an invalid message (ValueError('too many values to unpack")
    assert raised.value.why.endswith("and was killed")
    assert code.pids == []
