"""Custom nodes in C, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import trio

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import ConfigError, CustomNodeFailure
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo
from ovmstrio.runtimes.pipelines.custom_nodes.native.isolated_node import IsolatedNode, open_isolated_node
from tests.support.native_nodes import compiled, copy_of_fixture, names_in
from tests.support.processes import is_resource_tracker
from tests.support.waits import until_async

X = np.arange(10, dtype=np.float32).reshape(1, 10)
BAD = -np.ones((1, 10), np.float32)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Give a fixture library of this test's own."""
    return copy_of_fixture(tmp_path)


def children() -> list[psutil.Process]:
    """List the processes that this one has started and that still run, but for the one of Python's shared memory."""
    return [each for each in psutil.Process().children(recursive=True) if not is_resource_tracker(each)]


def mark_of(library: Path) -> Path:
    """Give the file in which the library marks each call that hangs."""
    return library.with_suffix(".mark")


def hangs(library: Path, count: int) -> bool:
    """Tell whether so many calls have hung so far."""
    mark = mark_of(library)
    return mark.exists() and mark.stat().st_size == count


async def leave_hanging(custom_node: IsolatedNode, library: Path) -> None:
    """Make a call that hangs, and leave it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(custom_node.execute, {"x": BAD})
        await until_async(partial(hangs, library, 1))
        nursery.cancel_scope.cancel()


def has_another_process(custom_node: IsolatedNode, pid: int | None) -> bool:
    """Tell whether a node has a process, and not the given one."""
    return custom_node.pid not in {None, pid}


@asynccontextmanager
async def opened(library: Path, grace_seconds: float = 5.0, **params: str) -> AsyncIterator[IsolatedNode]:
    """Open a node, close it, and see that no process is left."""
    params = {**params, "mark": str(mark_of(library))}
    async with trio.open_nursery() as nursery:
        custom_node = await open_isolated_node(library, "n", params, nursery=nursery, grace_seconds=grace_seconds)
        try:
            yield custom_node
        finally:
            await custom_node.aclose()
    assert not children()


async def test_a_node_works_as_in_the_server(library: Path) -> None:
    """It describes itself, takes and gives arrays of all shapes, and gives them for the caller alone."""
    async with opened(library) as custom_node:
        assert custom_node.inputs == {"x": ItemInfo("x", BY_NAME["FP32"], (1, -1))}
        assert custom_node.outputs == {"y": ItemInfo("y", BY_NAME["FP32"], (1, -1))}
        assert custom_node.pid in {child.pid for child in children()}
        given: dict[str, np.ndarray[Any, Any]] = {
            "x": X[:, ::2],
            "a": np.array(7, np.int64),
            "other": np.zeros((0, 3), np.uint8),
        }
        outputs = await custom_node.execute(given)
        np.testing.assert_array_equal(outputs["y"], X[:, ::2])
        assert outputs["b"].shape == ()
        assert outputs["b"] == 7
        assert outputs["other"].shape == (0, 3)
        assert outputs["y"].flags.carray


async def test_calls_run_side_by_side(library: Path) -> None:
    """Results go to their own callers."""
    results: dict[int, Any] = {}
    async with opened(library) as custom_node:

        async def call(number: int) -> None:
            results[number] = (await custom_node.execute({"x": np.full(1000, number, np.float32)}))["y"]

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)
    assert {number: set(array.tolist()) for number, array in results.items()} == {n: {float(n)} for n in range(20)}


async def test_inputs_are_never_written_to(library: Path) -> None:
    """The process has copies."""
    async with opened(library, execute="write") as custom_node:
        array = X.copy()
        outputs = await custom_node.execute({"x": array})
        assert outputs["y"].tobytes() == bytes([42]) * X.nbytes
        np.testing.assert_array_equal(array, X)


@pytest.mark.parametrize(
    ("execute", "text"),
    [
        ("error", "execute returned 7 (NODE_LIBRARY_EXECUTION_FAILED)"),
        ("negative", "-3 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
    ],
)
async def test_a_failure_is_told_in_the_same_words(library: Path, execute: str, text: str) -> None:
    """The process goes on."""
    async with opened(library, execute=execute) as custom_node:
        pid = custom_node.pid
        for _ in range(2):
            with pytest.raises(CustomNodeFailure) as caught:
                await custom_node.execute({"x": X})
            assert caught.value.message.endswith(text)
        assert custom_node.pid == pid


async def test_a_type_that_the_interface_lacks_is_refused(library: Path) -> None:
    """Before it is sent anywhere."""
    async with opened(library) as custom_node:
        with pytest.raises(CustomNodeFailure, match="input 'x' is of bool"):
            await custom_node.execute({"x": np.zeros(3, np.bool_)})


@pytest.mark.parametrize("params", [{"initialize": "error"}, {"outputs_info": "null"}])
async def test_a_node_that_cannot_be_opened_says_the_same(library: Path, params: dict[str, str]) -> None:
    """No process is left."""
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError) as caught:
            await open_isolated_node(library, "n", params, nursery=nursery)
    (problem,) = caught.value.problems
    assert problem.file == str(library)
    assert "NODE_LIBRARY_" in problem.message
    assert not children()


async def test_an_abort_while_the_node_is_opened_is_an_error_of_the_configuration(library: Path) -> None:
    """It names the signal."""
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match=r"its process was killed by SIGABRT \(NODE_LIBRARY_INITIALIZE_FAILED\)"):
            await open_isolated_node(library, "n", {"initialize": "abort"}, nursery=nursery)
    assert not children()


async def test_a_library_that_ends_its_process_when_it_is_loaded_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Neither is there a process."""
    source = tmp_path / "node.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }\n")
    library = compiled(source, tmp_path / "node.so")
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match="its process was killed by SIGABRT"):
            await open_isolated_node(library, "n", {}, nursery=nursery)
    assert not children()
    assert names_in(tmp_path) == ["node.c", "node.so"]


@pytest.mark.parametrize(("execute", "name"), [("segv", "SIGSEGV"), ("abort", "SIGABRT")])
async def test_a_crash_fails_the_request_and_not_the_server(library: Path, execute: str, name: str) -> None:
    """The signal is named, and the node has a new process."""
    async with opened(library, execute=execute) as custom_node:
        for _ in range(2):
            pid = custom_node.pid
            with pytest.raises(CustomNodeFailure, match=rf"its process was killed by {name} \(NODE_LIBRARY_EXEC"):
                await custom_node.execute({"x": X})
            await until_async(partial(has_another_process, custom_node, pid))


async def test_a_crash_fails_all_calls_of_the_process_and_none_after_it(library: Path) -> None:
    """Those that come after it are made by the new process."""
    async with opened(library, execute="hang_if_negative") as custom_node:
        failures: list[CustomNodeFailure] = []

        async def call() -> None:
            try:
                await custom_node.execute({"x": BAD})
            except CustomNodeFailure as failure:
                failures.append(failure)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
            assert (await custom_node.execute({"x": X}))["y"].shape == (1, 10)
            assert custom_node.pid is not None
            await until_async(partial(hangs, library, 3))
            os.kill(custom_node.pid, signal.SIGKILL)
        assert len(failures) == 3
        assert all("was killed by SIGKILL" in failure.message for failure in failures)
        np.testing.assert_array_equal((await custom_node.execute({"x": X}))["y"], X)


async def test_a_process_that_cannot_be_started_again_is_tried_by_calls(library: Path) -> None:
    """A call that finds none fails with the reason, and starts one when it can, at most once a second."""
    async with opened(library, execute="segv_if_negative") as custom_node:
        hidden = library.with_suffix(".hidden")
        os.rename(library, hidden)  # noqa: PTH104 - takes no time worth a thread
        with pytest.raises(CustomNodeFailure, match="SIGSEGV"):
            await custom_node.execute({"x": BAD})
        with pytest.raises(CustomNodeFailure, match=r"cannot be started again.*No such file.*LOAD_FAILED_OPEN"):
            await custom_node.execute({"x": X})
        os.rename(hidden, library)  # noqa: PTH104 - as above
        with trio.fail_after(60):
            while custom_node.pid is None:
                with suppress(CustomNodeFailure):
                    await custom_node.execute({"x": X})
                await trio.lowlevel.checkpoint()
        np.testing.assert_array_equal((await custom_node.execute({"x": X}))["y"], X)


async def test_a_process_with_a_call_that_nobody_waits_for_is_replaced_after_a_grace(library: Path) -> None:
    """The client that leaves does not wait; other calls of that process are not disturbed."""
    async with opened(library, grace_seconds=2, execute="hang_if_negative") as custom_node:
        pid = custom_node.pid
        await leave_hanging(custom_node, library)
        np.testing.assert_array_equal((await custom_node.execute({"x": X}))["y"], X)
        assert custom_node.pid == pid
        await until_async(partial(has_another_process, custom_node, pid))
        np.testing.assert_array_equal((await custom_node.execute({"x": X}))["y"], X)


async def test_a_process_is_not_killed_under_a_call_that_is_waited_for(library: Path) -> None:
    """It takes no more calls, and is killed when the last of its callers leaves."""
    async with opened(library, grace_seconds=2, execute="hang_if_negative") as custom_node:
        pid = custom_node.pid
        async with trio.open_nursery() as nursery:
            await leave_hanging(custom_node, library)
            nursery.start_soon(custom_node.execute, {"x": BAD})
            await until_async(partial(hangs, library, 2))
            with trio.fail_after(60):
                while custom_node.pid == pid:
                    await custom_node.execute({"x": X})
            assert {pid, custom_node.pid} == {child.pid for child in children()}
            assert pid != custom_node.pid
            nursery.cancel_scope.cancel()
        await until_async(lambda: {custom_node.pid} == {child.pid for child in children()})


async def test_closing_ends_a_process_whose_call_hangs(library: Path) -> None:
    """By force, after the grace."""
    async with opened(library, grace_seconds=0.2, execute="hang") as custom_node:
        await leave_hanging(custom_node, library)
    assert not children()


async def test_who_leaves_while_a_node_is_opened_leaves_no_process(library: Path) -> None:
    """Although ``initialize`` never ends."""
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as opening:
            params = {"initialize": "hang", "mark": str(mark_of(library))}
            opening.start_soon(partial(open_isolated_node, library, "n", params, nursery=nursery))
            await until_async(partial(hangs, library, 1))
            opening.cancel_scope.cancel()
        await until_async(lambda: not children())


async def test_a_process_ends_with_its_server(library: Path) -> None:
    """However the server ends."""
    program = """if True:
        import sys, trio, pathlib
        from ovmstrio.runtimes.pipelines.custom_nodes.native.isolated_node import open_isolated_node
        async def main():
            async with trio.open_nursery() as nursery:
                node = await open_isolated_node(pathlib.Path(sys.argv[1]), "n", {}, nursery=nursery)
                print(node.pid, flush=True)
                await trio.sleep_forever()
        trio.run(main)
    """
    command = [sys.executable, "-c", program, str(library)]
    server = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        worker = psutil.Process(int(await server.stdout.receive_some()))
    finally:
        server.kill()
        await server.wait()
    await until_async(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    await server.stdout.aclose()


async def test_no_process_outlives_its_nursery(library: Path) -> None:
    """Even if nobody closes the node."""
    async with trio.open_nursery() as nursery:
        await open_isolated_node(library, "n", {}, nursery=nursery)
        assert len(children()) == 1
        nursery.cancel_scope.cancel()
    assert not children()


async def test_signals_for_the_group_do_not_end_a_process(library: Path) -> None:
    """The server ends it when it has done its work."""
    async with opened(library) as custom_node:
        assert custom_node.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(custom_node.pid, number)
        np.testing.assert_array_equal((await custom_node.execute({"x": X}))["y"], X)
