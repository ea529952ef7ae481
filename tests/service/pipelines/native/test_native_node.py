from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Overloaded
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.pipelines.custom_node import MAX_CONCURRENT_CALLS, ItemInfo
from ovmstrio.pipelines.native import node
from ovmstrio.pipelines.native.node import NativeNode, open_native_node
from tests.support.examples import examples
from tests.support.native_nodes import FIXTURE_SOURCE, Account, compiled, copy_of_fixture
from tests.support.pipelines import hosting
from tests.support.waits import until_async

X = np.arange(10, dtype=np.float32).reshape(1, 10)
MEBI = 2**20


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return copy_of_fixture(tmp_path)


@asynccontextmanager
async def opened(library: Path, calls_at_once: int = MAX_CONCURRENT_CALLS, **params: str) -> AsyncIterator[NativeNode]:
    async with hosting() as tasks:
        native = await open_native_node(library, "n", params, tasks=tasks, calls_at_once=calls_at_once)
        try:
            yield native
        finally:
            await native.aclose()


async def test_node_has_infos(library: Path) -> None:
    async with opened(library) as native:
        assert native.inputs == {"x": ItemInfo("x", BY_NAME["FP32"], (1, -1))}
        assert native.outputs == {"y": ItemInfo("y", BY_NAME["FP32"], (1, -1))}
    account = Account(library)
    account.check()
    assert (account.count("made"), account.count("initialized"), account.count("deinitialized")) == (4, 1, 1)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u1", "i1", "i2", "u2", "i4", "f8", "i8"])
@pytest.mark.parametrize("shape", [(1, 10), (), (0, 3), (2, 1, 3, 1)])
async def test_arrays_of_every_type_and_shape_pass(library: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    async with opened(library) as native:
        outputs = await native.execute({"x": array, "a": np.array([1, 2], np.int64)})
        assert list(outputs) == ["b", "y"]  # the order in which the inputs came to the library
        assert outputs["y"].dtype == array.dtype
        assert outputs["y"].shape == array.shape
        np.testing.assert_array_equal(outputs["y"], array)
        assert outputs["b"].tolist() == [1, 2]
        del outputs
    Account(library).check()


async def test_type_without_a_precision_is_refused(library: Path) -> None:
    async with opened(library) as native:
        with pytest.raises(CustomNodeFailure, match="input 'x' has unsupported dtype uint32"):
            await native.execute({"x": np.zeros(3, np.uint32)})


async def test_exclusive_arrays_are_not_copied(library: Path) -> None:
    async with opened(library, execute="address") as native:
        array = np.zeros(MEBI, np.uint8)
        output = (await native.execute({"x": array}))["y"]
        assert output.tolist() == [array.ctypes.data, output.ctypes.data]
        assert output.flags.writeable
        del output


@pytest.mark.parametrize("kind", ["shared", "strided", "unaligned"])
async def test_shared_strided_and_unaligned_arrays_are_copied(library: Path, kind: str) -> None:
    array = np.zeros((MEBI // 4, 2), np.float32)[:, 0]
    if kind == "shared":
        array = np.zeros(MEBI // 4, np.float32)
        array.flags.writeable = False
    elif kind == "unaligned":
        array = np.zeros(MEBI + 1, np.uint8)[1:].view(np.float32)
    async with opened(library, execute="address") as native:
        output = (await native.execute({"x": array}))["y"]
        assert output[0] != array.ctypes.data
        del output
    async with opened(library, execute="write") as native:
        output = (await native.execute({"x": array}))["y"]
        assert output.tobytes() == bytes([42]) * MEBI
        assert not array.any()
        del output
    Account(library).check()


async def test_input_returned_as_output_is_copied(library: Path) -> None:
    async with opened(library, execute="return_input") as native:
        array = X.copy()
        output = (await native.execute({"x": array}))["y"]
        assert not np.shares_memory(output, array)
        np.testing.assert_array_equal(output, X)
    Account(library).check()


async def test_memory_is_released_with_its_last_array(library: Path) -> None:
    async with opened(library) as native:
        outputs = await native.execute({"x": X})
        view = outputs.pop("y")[0, 3:5]
        account = Account(library)
        await until_async(lambda: account.count("made") == account.count("released") + 1)
        assert view.tolist() == [3, 4]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(native.aclose)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert account.count("deinitialized") == 0
            del view
        assert account.count("deinitialized") == 1
    account.check()


async def test_array_that_outlives_its_node_deinitializes_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "GRACE_SECONDS", 0.01)
    async with opened(library) as native:
        outputs = await native.execute({"x": X})
    account = Account(library)
    assert account.count("deinitialized") == 0
    np.testing.assert_array_equal(outputs["y"], X)
    outputs.clear()
    await until_async(lambda: account.count("deinitialized") == 1)
    account.check()
    with pytest.raises(CustomNodeFailure, match="is closed"):
        await native.execute({"x": X})


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"execute": "error"}, "execute returned 7 (NODE_LIBRARY_EXECUTION_FAILED)"),
        ({"execute": "null"}, "(NODE_LIBRARY_OUTPUTS_CORRUPTED)"),
        ({"execute": "zero"}, "0 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"execute": "negative"}, "-3 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"execute": "huge"}, "1073741824 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"outputs": "gng"}, "output 1 has no name (NODE_LIBRARY_OUTPUT_MISSING_NAME)"),
        ({"outputs": "pg"}, "output 'o0' has precision 0 (NODE_LIBRARY_INVALID_PRECISION)"),
        ({"outputs": "gq"}, "output 'o1' has precision 77 (NODE_LIBRARY_INVALID_PRECISION)"),
        ({"outputs": "s"}, "output 'o0' of UINT8 [2, 3] has 5 bytes, expected 6 (NODE_LIBRARY_INVALID_CONTENT_SIZE)"),
        ({"outputs": "m"}, "has 18446744073709551615 bytes, expected 6 (NODE_LIBRARY_INVALID_CONTENT_SIZE)"),
        ({"outputs": "h"}, "has 6 bytes, expected 340282366920938463426481119284349108225"),
        ({"outputs": "gd"}, "the data of output 'o1' is null (NODE_LIBRARY_INVALID_CONTENT_SIZE)"),
        ({"outputs": "r"}, "expected 0 to 32 (NODE_LIBRARY_INVALID_SHAPE)"),
        ({"outputs": "x"}, "(NODE_LIBRARY_INVALID_SHAPE)"),
        ({"outputs": "i"}, "is too large for any array (NODE_LIBRARY_INVALID_SHAPE)"),
        ({"outputs": "sn"}, "(NODE_LIBRARY_INVALID_CONTENT_SIZE)"),
    ],
)
async def test_invalid_outputs_fail_the_call(library: Path, params: dict[str, str], code: str) -> None:
    async with opened(library, MAX_CONCURRENT_CALLS, **{"execute": "outputs", **params}) as native:
        with pytest.raises(CustomNodeFailure) as caught:
            await native.execute({"x": X})
        assert caught.value.message.endswith(code) or code in caught.value.message
        assert f"node 'n' of {library}" in caught.value.message
        Account(library).check()


@pytest.mark.parametrize(
    ("letters", "shapes"),
    [
        ("gz", [(2, 3), (0, 3)]),
        ("c", [()]),
        ("ggggggggggg", [(2, 3)] * 10),
        ("ga", [(2, 3)] * 2),
        ("za", [(0, 3), (2, 3)]),
    ],
)
async def test_unusual_outputs_are_accepted(library: Path, letters: str, shapes: list[tuple[int, ...]]) -> None:
    async with opened(library, execute="outputs", outputs=letters) as native:
        outputs = await native.execute({})
        assert [outputs[f"o{index}"].shape for index in range(len(outputs))] == shapes
        assert outputs["o0"].ravel().tolist() == [0] * outputs["o0"].size
        if letters == "ga":
            outputs["o1"][:] = 9
            assert not outputs["o0"].any()
        outputs.clear()
        gc.collect()
    Account(library).check()


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"initialize": "error"}, "initialize returned 5 (NODE_LIBRARY_INITIALIZE_FAILED)"),
        ({"inputs_info": "error"}, "getInputsInfo returned 3 (NODE_LIBRARY_METADATA_FAILED)"),
        ({"outputs_info": "error"}, "getOutputsInfo returned 3 (NODE_LIBRARY_METADATA_FAILED)"),
        ({"inputs_info": "null"}, "(NODE_LIBRARY_OUTPUTS_CORRUPTED)"),
        (
            {"outputs_info": "negative"},
            "getOutputsInfo returned -1 entries, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)",
        ),
        ({"inputs_info": "huge"}, "(NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"inputs_info": "no_name"}, "(NODE_LIBRARY_METADATA_FAILED)"),
        ({"outputs_info": "no_shape"}, "(NODE_LIBRARY_METADATA_FAILED)"),
    ],
)
async def test_failed_open_releases_everything(library: Path, params: dict[str, str], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with hosting() as tasks:
            await open_native_node(library, "n", params, tasks=tasks)
    (problem,) = caught.value.problems
    assert code in problem.message
    assert problem.file == str(library)
    account = Account(library)
    account.check()
    assert account.count("deinitialized") == account.count("initialized") == ("initialize" not in params)


async def test_cancelled_open_does_not_wait(library: Path) -> None:
    account = Account(library)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(open_native_node, library, "n", {"initialize": "wait"}, tasks=nursery))
        await until_async(lambda: account.count("waiting") == 1)
        nursery.cancel_scope.cancel()
    account.open()
    await until_async(lambda: account.count("deinitialized") == 1)
    account.check()


async def test_nodes_of_one_library_have_separate_managers(library: Path) -> None:
    async with opened(library), opened(library):
        assert Account(library).count("initialized") == 2
    assert Account(library).count("deinitialized") == 2


async def test_concurrent_calls_are_limited(library: Path) -> None:
    async with opened(library, calls_at_once=3, execute="wait") as native:
        account = Account(library)
        results: dict[int, Any] = {}

        async def call(number: int) -> None:
            results[number] = (await native.execute({"x": np.full((1, 2), number, np.float32)}))["y"].tolist()

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(call, number)
            await until_async(lambda: account.count("waiting") == 3)
            account.open()
        assert results == {number: [[number, number]] for number in range(5)}
    account.check()


async def test_cancelled_call_does_not_wait(library: Path) -> None:
    async with opened(library, execute="wait") as native:
        account = Account(library)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(native.execute, {"x": X})
            await until_async(lambda: account.count("waiting") == 1)
            nursery.cancel_scope.cancel()
        assert native.abandoned_calls == 1
        account.open()
        await until_async(lambda: native.abandoned_calls == 0)
    account.check()
    assert account.count("made") > 4
    assert account.count("deinitialized") == 1


async def test_abandoned_threads_are_limited(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "GRACE_SECONDS", 0.01)
    async with opened(library, calls_at_once=2, execute="wait") as native:
        account = Account(library)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(native.execute, {"x": X})
            await until_async(lambda: account.count("waiting") == 2)
            nursery.cancel_scope.cancel()
        assert native.abandoned_calls == 2
        with pytest.raises(Overloaded, match="all 2 threads of node 'n'"):
            await native.execute({"x": X})
    assert account.count("deinitialized") == 0
    account.open()
    await until_async(lambda: account.count("deinitialized") == 1)
    account.check()


async def test_cancelled_close_deinitializes_once(library: Path) -> None:
    async with hosting() as tasks:
        native = await open_native_node(library, "n", {}, tasks=tasks)
        with trio.CancelScope() as scope:
            scope.cancel()
            await native.aclose()
        await native.aclose()
        assert Account(library).count("deinitialized") == 1


GOOD: Final = frozenset("gzca")
PROGRAM: Final = Path(__file__).with_name("memory_program.py")


@pytest.fixture(scope="module")
def shared_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_fixture(tmp_path_factory.mktemp("native"))


@settings(max_examples=examples(100), deadline=None)
@given(letters=st.text("gzcanpqsdmhrxi", min_size=1, max_size=12), held_numbers=st.sets(st.integers(0, 9)))
def test_outputs_are_released_once(shared_library: Path, letters: str, held_numbers: set[int]) -> None:

    async def example() -> None:
        async with hosting() as tasks:
            node = await open_native_node(shared_library, "n", {"execute": "outputs", "outputs": letters}, tasks=tasks)
            account = Account(shared_library)
            try:
                outputs = await node.execute({})
            except CustomNodeFailure:
                assert not set(letters) <= GOOD
                account.check()
            else:
                assert set(letters) <= GOOD
                held = [array for name, array in outputs.items() if int(name[1:]) in held_numbers]
                expected = [array.copy() for array in held]
                outputs.clear()
                for array, values in zip(held, expected, strict=True):
                    np.testing.assert_array_equal(array, values)
                held.clear()
            # What is left are references in variables of this function.
            outputs = array = None  # type: ignore[assignment]
            await node.aclose()
            account.check()
            assert account.count("initialized") == account.count("deinitialized")

    trio.run(example)


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [False, True])
def test_address_sanitizer_reports_no_error_and_no_leak(tmp_path: Path, leaks: bool) -> None:
    """Memory of a shared_library that was built with it is used rightly in all modes, and a leak would be seen.

    The interpreter keeps memory of its own to the end; what counts is what the shared_library has allocated.
    """
    path = compiled(FIXTURE_SOURCE, tmp_path / "asan.so", "-fsanitize=address", "-O1", "-fno-omit-frame-pointer")
    environment = {
        **os.environ,
        "LD_PRELOAD": _runtime("libasan.so"),
        "ASAN_OPTIONS": "detect_leaks=1:exitcode=99",
        "LSAN_OPTIONS": "exitcode=0",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, str(PROGRAM), str(path), *(["leak"] if leaks else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nodes were called" in done.stdout
    # The opened copy is deleted before the report is made, which contains its name and addresses.
    assert (f"/.{path.name}." in done.stderr) is leaks, done.stderr


def _runtime(name: str) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"needs {name}")
    return path
