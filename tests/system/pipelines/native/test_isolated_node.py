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

from ovmstrio.core.errors import ConfigError, CustomNodeFailure
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.pipelines.custom_node import ItemInfo
from ovmstrio.pipelines.native.isolated_node import IsolatedNode, open_isolated_node
from ovmstrio.pipelines.open_node import open_custom_node
from ovmstrio.pipelines.python_node import PythonNode
from tests.support.native_nodes import compiled, copy_of_fixture, names_in
from tests.support.pipelines import write_node
from tests.support.processes import is_at_work, is_resource_tracker
from tests.support.waits import until_async

X = np.arange(10, dtype=np.float32).reshape(1, 10)
HANGING = -np.ones((1, 10), np.float32)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return copy_of_fixture(tmp_path)


_others: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _leave_shared_servers_out() -> None:
    """Servers that other tests of this process share are its children, too."""
    _others.clear()
    _others.update(psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if each not in _others and not is_resource_tracker(each)]


def mark_of(library: Path) -> Path:
    return library.with_suffix(".mark")


def hangs(library: Path, count: int) -> bool:
    mark = mark_of(library)
    return mark.exists() and mark.stat().st_size == count


async def leave_hanging(isolated: IsolatedNode, library: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(isolated.execute, {"x": HANGING})
        await until_async(partial(hangs, library, 1))
        nursery.cancel_scope.cancel()


def has_another_process(isolated: IsolatedNode, pid: int | None) -> bool:
    return isolated.pid not in {None, pid}


@asynccontextmanager
async def opened(library: Path, grace_seconds: float = 5.0, **params: str) -> AsyncIterator[IsolatedNode]:
    params = {**params, "mark": str(mark_of(library))}
    async with trio.open_nursery() as nursery:
        isolated = await open_isolated_node(library, "n", params, nursery=nursery, grace_seconds=grace_seconds)
        try:
            yield isolated
        finally:
            await isolated.aclose()
    assert not children()


async def test_node_computes_as_in_the_server(library: Path) -> None:
    async with opened(library) as isolated:
        assert isolated.inputs == {"x": ItemInfo("x", BY_NAME["FP32"], (1, -1))}
        assert isolated.outputs == {"y": ItemInfo("y", BY_NAME["FP32"], (1, -1))}
        assert isolated.pid in {child.pid for child in children()}
        inputs: dict[str, np.ndarray[Any, Any]] = {
            "x": X[:, ::2],
            "a": np.array(7, np.int64),
            "other": np.zeros((0, 3), np.uint8),
        }
        outputs = await isolated.execute(inputs)
        np.testing.assert_array_equal(outputs["y"], X[:, ::2])
        assert outputs["b"].shape == ()
        assert outputs["b"] == 7
        assert outputs["other"].shape == (0, 3)
        assert outputs["y"].flags.carray


async def test_concurrent_calls_get_their_outputs(library: Path) -> None:
    results: dict[int, Any] = {}
    async with opened(library) as isolated:

        async def call(number: int) -> None:
            results[number] = (await isolated.execute({"x": np.full(1000, number, np.float32)}))["y"]

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(call, number)
    assert {number: set(array.tolist()) for number, array in results.items()} == {n: {float(n)} for n in range(20)}


@pytest.mark.parametrize(
    ("execute", "text"),
    [
        ("error", "execute returned 7 (NODE_LIBRARY_EXECUTION_FAILED)"),
        ("negative", "-3 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
    ],
)
async def test_failure_has_the_message_of_the_library_and_keeps_the_process(
    library: Path, execute: str, text: str
) -> None:
    async with opened(library, execute=execute) as isolated:
        pid = isolated.pid
        for _ in range(2):
            with pytest.raises(CustomNodeFailure) as caught:
                await isolated.execute({"x": X})
            assert caught.value.message.endswith(text)
        assert isolated.pid == pid


@pytest.mark.parametrize("params", [{"initialize": "error"}, {"outputs_info": "null"}])
async def test_failed_open_leaves_no_process(library: Path, params: dict[str, str]) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError) as caught:
            await open_isolated_node(library, "n", params, nursery=nursery)
    (problem,) = caught.value.problems
    assert problem.file == str(library)
    assert "NODE_LIBRARY_" in problem.message
    assert not children()


async def test_abort_in_initialize_is_a_configuration_error(library: Path) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match=r"its process was killed by SIGABRT \(NODE_LIBRARY_INITIALIZE_FAILED\)"):
            await open_isolated_node(library, "n", {"initialize": "abort"}, nursery=nursery)
    assert not children()


async def test_abort_of_a_library_when_it_is_loaded_leaves_no_copy(tmp_path: Path) -> None:
    source = tmp_path / "node.c"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }\n")
    library = compiled(source, tmp_path / "node.so")
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match="its process was killed by SIGABRT"):
            await open_isolated_node(library, "n", {}, nursery=nursery)
    assert not children()
    assert names_in(tmp_path) == ["node.c", "node.so"]


FORKING = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void begin(void) {
    pid_t child = fork();
    if (!child) for (;;) pause();
    FILE* file = fopen(CHILD, "w");
    fprintf(file, "%d", child);
    fclose(file);
    abort();
}
"""


async def test_child_of_a_library_ends_with_its_process(tmp_path: Path) -> None:
    source, child = tmp_path / "node.c", tmp_path / "pid"
    source.write_text(FORKING.replace("CHILD", f'"{child}"'))
    library = compiled(source, tmp_path / "node.so")
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match="its process was killed by SIGABRT"):
            await open_isolated_node(library, "n", {}, nursery=nursery)
    await until_async(lambda: not is_at_work(int(child.read_text())))


@pytest.mark.parametrize(("execute", "name"), [("segv", "SIGSEGV"), ("abort", "SIGABRT")])
async def test_crash_fails_the_call_and_replaces_the_process(library: Path, execute: str, name: str) -> None:
    async with opened(library, execute=execute) as isolated:
        for _ in range(2):
            pid = isolated.pid
            with pytest.raises(CustomNodeFailure, match=rf"its process was killed by {name} \(NODE_LIBRARY_EXEC"):
                await isolated.execute({"x": X})
            await until_async(partial(has_another_process, isolated, pid))


async def test_crash_fails_all_calls_of_the_process(library: Path) -> None:
    async with opened(library, execute="hang_if_negative") as isolated:
        failures: list[CustomNodeFailure] = []

        async def call() -> None:
            try:
                await isolated.execute({"x": HANGING})
            except CustomNodeFailure as failure:
                failures.append(failure)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
            assert (await isolated.execute({"x": X}))["y"].shape == (1, 10)
            assert isolated.pid is not None
            await until_async(partial(hangs, library, 3))
            os.kill(isolated.pid, signal.SIGKILL)
        assert len(failures) == 3
        assert all("was killed by SIGKILL" in failure.message for failure in failures)
        np.testing.assert_array_equal((await isolated.execute({"x": X}))["y"], X)


async def test_failed_restart_is_repeated_by_calls(library: Path) -> None:
    async with opened(library, execute="segv_if_negative") as isolated:
        hidden = library.with_suffix(".hidden")
        os.rename(library, hidden)  # noqa: PTH104 - takes no time worth a thread
        with pytest.raises(CustomNodeFailure, match="SIGSEGV"):
            await isolated.execute({"x": HANGING})
        with pytest.raises(CustomNodeFailure, match=r"cannot be restarted.*No such file.*LOAD_FAILED_OPEN"):
            await isolated.execute({"x": X})
        os.rename(hidden, library)  # noqa: PTH104 - as above
        with trio.fail_after(60):
            while isolated.pid is None:
                with suppress(CustomNodeFailure):
                    await isolated.execute({"x": X})
                await trio.lowlevel.checkpoint()
        np.testing.assert_array_equal((await isolated.execute({"x": X}))["y"], X)


async def test_process_of_an_abandoned_call_is_replaced_after_a_grace(library: Path) -> None:
    async with opened(library, grace_seconds=2, execute="hang_if_negative") as isolated:
        pid = isolated.pid
        await leave_hanging(isolated, library)
        np.testing.assert_array_equal((await isolated.execute({"x": X}))["y"], X)
        assert isolated.pid == pid
        await until_async(partial(has_another_process, isolated, pid))
        np.testing.assert_array_equal((await isolated.execute({"x": X}))["y"], X)


async def test_replaced_process_ends_after_its_last_call(library: Path) -> None:
    async with opened(library, grace_seconds=2, execute="hang_if_negative") as isolated:
        pid = isolated.pid
        async with trio.open_nursery() as nursery:
            await leave_hanging(isolated, library)
            nursery.start_soon(isolated.execute, {"x": HANGING})
            await until_async(partial(hangs, library, 2))
            with trio.fail_after(60):
                while isolated.pid == pid:
                    await isolated.execute({"x": X})
            assert {pid, isolated.pid} == {child.pid for child in children()}
            assert pid != isolated.pid
            nursery.cancel_scope.cancel()
        await until_async(lambda: {isolated.pid} == {child.pid for child in children()})


async def test_closing_kills_a_process_whose_call_hangs(library: Path) -> None:
    async with opened(library, grace_seconds=0.2, execute="hang") as isolated:
        await leave_hanging(isolated, library)
    assert not children()


async def test_cancelled_open_leaves_no_process(library: Path) -> None:
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as opening:
            params = {"initialize": "hang", "mark": str(mark_of(library))}
            opening.start_soon(partial(open_isolated_node, library, "n", params, nursery=nursery))
            await until_async(partial(hangs, library, 1))
            opening.cancel_scope.cancel()
        await until_async(lambda: not children())


async def test_process_ends_with_its_server(library: Path) -> None:
    program = """if True:
        import sys, trio, pathlib
        from ovmstrio.pipelines.native.isolated_node import open_isolated_node
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


async def test_process_ends_with_its_nursery(library: Path) -> None:
    async with trio.open_nursery() as nursery:
        await open_isolated_node(library, "n", {}, nursery=nursery)
        assert len(children()) == 1
        nursery.cancel_scope.cancel()
    assert not children()


async def test_signals_of_the_group_are_ignored(library: Path) -> None:
    async with opened(library) as isolated:
        assert isolated.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(isolated.pid, number)
        np.testing.assert_array_equal((await isolated.execute({"x": X}))["y"], X)


async def test_only_shared_libraries_are_isolated(library: Path) -> None:
    async with trio.open_nursery() as nursery:
        native = await open_custom_node(library, "node", {}, tasks=nursery, is_isolated=True)
        python = await open_custom_node(write_node(library.parent), "node", {}, tasks=nursery, is_isolated=True)
        assert [type(node) for node in (native, python)] == [IsolatedNode, PythonNode]
        assert (await native.execute({"x": X}))["y"].tolist() == X.tolist()
        await native.aclose()
        await python.aclose()
