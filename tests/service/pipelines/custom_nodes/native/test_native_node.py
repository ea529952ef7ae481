"""Custom nodes in C, in this process."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Overloaded
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo
from ovmstrio.runtimes.pipelines.custom_nodes.native import native_node as node
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_node import NativeNode, open_native_node
from ovmstrio.runtimes.pipelines.custom_nodes.node_threads import CALLS_AT_ONCE
from tests.support.native_nodes import Account, copy_of_fixture
from tests.support.tasks import hosting
from tests.support.waits import until_async

X = np.arange(10, dtype=np.float32).reshape(1, 10)
MEBI = 2**20


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Give a fixture library of this test's own."""
    return copy_of_fixture(tmp_path)


@asynccontextmanager
async def opened(library: Path, calls_at_once: int = CALLS_AT_ONCE, **params: str) -> AsyncIterator[NativeNode]:
    """Open a node and close it."""
    async with hosting() as tasks:
        custom_node = await open_native_node(library, "n", params, tasks=tasks, calls_at_once=calls_at_once)
        try:
            yield custom_node
        finally:
            await custom_node.aclose()


async def test_a_node_describes_itself(library: Path) -> None:
    """A size of 0 is any size."""
    async with opened(library) as custom_node:
        assert custom_node.inputs == {"x": ItemInfo("x", BY_NAME["FP32"], (1, -1))}
        assert custom_node.outputs == {"y": ItemInfo("y", BY_NAME["FP32"], (1, -1))}
    account = Account(library)
    account.check()
    assert (account.count("made"), account.count("initialized"), account.count("deinitialized")) == (4, 1, 1)


@pytest.mark.parametrize("dtype", ["f4", "f2", "u1", "i1", "i2", "u2", "i4", "f8", "i8"])
@pytest.mark.parametrize("shape", [(1, 10), (), (0, 3), (2, 1, 3, 1)])
async def test_arrays_go_through_as_they_are(library: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """Every type of the interface, scalars and empty tensors too, several inputs at once."""
    given = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    async with opened(library) as custom_node:
        outputs = await custom_node.execute({"x": given, "a": np.array([1, 2], np.int64)})
        assert list(outputs) == ["b", "y"]  # the order in which the inputs came to the library
        assert outputs["y"].dtype == given.dtype
        assert outputs["y"].shape == given.shape
        np.testing.assert_array_equal(outputs["y"], given)
        assert outputs["b"].tolist() == [1, 2]
        del outputs
    Account(library).check()


async def test_a_type_that_the_interface_lacks_is_refused(library: Path) -> None:
    """The message names the input and its type."""
    async with opened(library) as custom_node:
        with pytest.raises(CustomNodeFailure, match="input 'x' is of uint32, which custom nodes cannot take"):
            await custom_node.execute({"x": np.zeros(3, np.uint32)})


async def test_nothing_is_copied_of_an_array_that_nobody_else_has(library: Path) -> None:
    """The library sees the array's own memory, and the output stands on the library's."""
    async with opened(library, execute="address") as custom_node:
        array = np.zeros(MEBI, np.uint8)
        output = (await custom_node.execute({"x": array}))["y"]
        assert output.tolist() == [array.ctypes.data, output.ctypes.data]
        assert output.flags.writeable
        del output


@pytest.mark.parametrize("kind", ["shared", "strided", "unaligned"])
async def test_an_array_is_copied_if_it_must(library: Path, kind: str) -> None:
    """Others may read it, or it is not laid out as the interface has it; its values stay as they are."""
    array = np.zeros((MEBI // 4, 2), np.float32)[:, 0]
    if kind == "shared":
        array = np.zeros(MEBI // 4, np.float32)
        array.flags.writeable = False
    elif kind == "unaligned":
        array = np.zeros(MEBI + 1, np.uint8)[1:].view(np.float32)
    async with opened(library, execute="address") as custom_node:
        output = (await custom_node.execute({"x": array}))["y"]
        assert output[0] != array.ctypes.data
        del output
    async with opened(library, execute="write") as custom_node:
        output = (await custom_node.execute({"x": array}))["y"]
        assert output.tobytes() == bytes([42]) * MEBI
        assert not array.any()
        del output
    Account(library).check()


async def test_an_input_that_a_library_gives_back_is_copied(library: Path) -> None:
    """So the output does not stand on memory that ends with the call."""
    async with opened(library, execute="return_input") as custom_node:
        array = X.copy()
        output = (await custom_node.execute({"x": array}))["y"]
        assert not np.shares_memory(output, array)
        np.testing.assert_array_equal(output, X)
    Account(library).check()


async def test_memory_is_released_with_the_last_array_on_it(library: Path) -> None:
    """A view keeps it; it is released before the node is deinitialised, which waits for it."""
    async with opened(library) as custom_node:
        outputs = await custom_node.execute({"x": X})
        view = outputs.pop("y")[0, 3:5]
        account = Account(library)
        await until_async(lambda: account.count("made") == account.count("released") + 1)
        assert view.tolist() == [3, 4]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(custom_node.aclose)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert account.count("deinitialized") == 0
            del view
        assert account.count("deinitialized") == 1
    account.check()


async def test_an_array_that_outlives_its_node_deinitialises_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing does not wait for ever, and no memory is released after the node's end."""
    monkeypatch.setattr(node, "GRACE_SECONDS", 0.01)
    async with opened(library) as custom_node:
        outputs = await custom_node.execute({"x": X})
    account = Account(library)
    assert account.count("deinitialized") == 0
    np.testing.assert_array_equal(outputs["y"], X)
    outputs.clear()
    await until_async(lambda: account.count("deinitialized") == 1)
    account.check()
    with pytest.raises(CustomNodeFailure, match="is closed"):
        await custom_node.execute({"x": X})


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"execute": "error"}, "execute returned 7 (NODE_LIBRARY_EXECUTION_FAILED)"),
        ({"execute": "null"}, "(NODE_LIBRARY_OUTPUTS_CORRUPTED)"),
        ({"execute": "zero"}, "0 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"execute": "negative"}, "-3 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"execute": "huge"}, "1073741824 outputs, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"outputs": "gng"}, "output 1 has none (NODE_LIBRARY_OUTPUT_MISSING_NAME)"),
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
async def test_what_cannot_be_used_fails_the_call(library: Path, params: dict[str, str], code: str) -> None:
    """Of several faults the first is told; every buffer is released once before the error is raised."""
    async with opened(library, CALLS_AT_ONCE, **{"execute": "outputs", **params}) as custom_node:
        with pytest.raises(CustomNodeFailure) as caught:
            await custom_node.execute({"x": X})
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
async def test_odd_outputs_are_taken(library: Path, letters: str, shapes: list[tuple[int, ...]]) -> None:
    """Empty tensors, scalars, a second output of one name (the first counts), two outputs on the same memory."""
    async with opened(library, execute="outputs", outputs=letters) as custom_node:
        outputs = await custom_node.execute({})
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
            "getOutputsInfo gave -1, expected 1 to 4096 (NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)",
        ),
        ({"inputs_info": "huge"}, "(NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT)"),
        ({"inputs_info": "no_name"}, "(NODE_LIBRARY_METADATA_FAILED)"),
        ({"outputs_info": "no_shape"}, "(NODE_LIBRARY_METADATA_FAILED)"),
    ],
)
async def test_a_node_that_cannot_be_opened_leaves_nothing(library: Path, params: dict[str, str], code: str) -> None:
    """What it gave is released, and it is deinitialised if it was initialised."""
    with pytest.raises(ConfigError) as caught:
        async with hosting() as tasks:
            await open_native_node(library, "n", params, tasks=tasks)
    (problem,) = caught.value.problems
    assert code in problem.message
    assert problem.file == str(library)
    account = Account(library)
    account.check()
    assert account.count("deinitialized") == account.count("initialized") == ("initialize" not in params)


async def test_who_leaves_while_a_node_is_opened_does_not_wait(library: Path) -> None:
    """The thread goes on; it releases what the node gives and deinitialises it."""
    account = Account(library)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(open_native_node, library, "n", {"initialize": "wait"}, tasks=nursery))
        await until_async(lambda: account.count("waiting") == 1)
        nursery.cancel_scope.cancel()
    account.open()
    await until_async(lambda: account.count("deinitialized") == 1)
    account.check()


async def test_nodes_of_one_library_have_managers_of_their_own(library: Path) -> None:
    """Each node is initialised and deinitialised by itself."""
    async with opened(library), opened(library):
        assert Account(library).count("initialized") == 2
    assert Account(library).count("deinitialized") == 2


async def test_calls_run_side_by_side(library: Path) -> None:
    """As many as the limiter has, others wait; results go to their own callers."""
    async with opened(library, calls_at_once=3, execute="wait") as custom_node:
        account = Account(library)
        results: dict[int, Any] = {}

        async def call(number: int) -> None:
            results[number] = (await custom_node.execute({"x": np.full((1, 2), number, np.float32)}))["y"].tolist()

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(call, number)
            await until_async(lambda: account.count("waiting") == 3)
            account.open()
        assert results == {number: [[number, number]] for number in range(5)}
    account.check()


async def test_a_client_that_leaves_does_not_wait(library: Path) -> None:
    """The call goes on in its thread, which releases what it gives; the node is deinitialised after that."""
    async with opened(library, execute="wait") as custom_node:
        account = Account(library)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(custom_node.execute, {"x": X})
            await until_async(lambda: account.count("waiting") == 1)
            nursery.cancel_scope.cancel()
        assert custom_node.abandoned_calls == 1
        account.open()
        await until_async(lambda: custom_node.abandoned_calls == 0)
    account.check()
    assert account.count("made") > 4
    assert account.count("deinitialized") == 1


async def test_threads_that_never_end_are_bounded(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls are refused, and closing leaves the node to the last of the threads."""
    monkeypatch.setattr(node, "GRACE_SECONDS", 0.01)
    async with opened(library, calls_at_once=2, execute="wait") as custom_node:
        account = Account(library)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(custom_node.execute, {"x": X})
            await until_async(lambda: account.count("waiting") == 2)
            nursery.cancel_scope.cancel()
        assert custom_node.abandoned_calls == 2
        with pytest.raises(Overloaded, match="all 2 threads of node 'n'"):
            await custom_node.execute({"x": X})
    assert account.count("deinitialized") == 0
    account.open()
    await until_async(lambda: account.count("deinitialized") == 1)
    account.check()


async def test_closing_is_done_although_the_closer_is_cancelled(library: Path) -> None:
    """A node is deinitialised once, however often it is closed."""
    async with hosting() as tasks:
        custom_node = await open_native_node(library, "n", {}, tasks=tasks)
        with trio.CancelScope() as scope:
            scope.cancel()
            await custom_node.aclose()
        await custom_node.aclose()
        assert Account(library).count("deinitialized") == 1
