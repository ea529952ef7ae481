from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.config.specs import PipelineNode
from ovmstrio.core.errors import CustomNodeFailure, NothingToGather, PipelineFailure
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import BY_NAME, Array, Tensor
from ovmstrio.pipelines.node_calls import NodeCall
from ovmstrio.pipelines.plan import create_plan
from ovmstrio.pipelines.servable import MAX_SHARDS, MAX_TASKS, PipelineRun
from ovmstrio.pipelines.structure import validate_structure
from tests.support.pipelines import make_node, make_pipeline
from tests.support.waits import WAIT_SECONDS

FP32 = BY_NAME["FP32"]
ROW = np.array([[1, 2]], np.float32)


def _tensor(name: str, array: Array) -> Tensor:
    return Tensor(name, FP32, array)


async def _run(
    nodes: Sequence[PipelineNode],
    outputs: Mapping[str, str],
    calls: Mapping[str, NodeCall],
    x: Array = ROW,
    demultiply_count: int | None = None,
) -> dict[str, Array]:
    spec = make_pipeline(nodes, outputs, demultiply_count=demultiply_count)
    structure, problems = validate_structure(spec)
    assert structure is not None
    assert [problem for problem in problems if problem.severity != "warning"] == []
    found = await PipelineRun(create_plan(structure, calls), InferRequest("pipeline"))({"x": _tensor("x", x)})
    return {name: tensor.array for name, tensor in found.items()}


async def _run_one(call: NodeCall, x: Array, demultiply_count: int) -> Array:
    return (await _run([TWO[0]], {"y": "one.y"}, {"one": call}, x, demultiply_count))["y"]


def _runs() -> int:
    gc.collect()
    return sum(isinstance(each, PipelineRun) for each in gc.get_objects())


def _tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


class Nodes:
    def __init__(self) -> None:
        self.alive = 0
        self.most = 0
        self.calls = 0

    def gives(self, make: Any, steps: int = 0) -> NodeCall:
        async def call(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
            self.calls += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            try:
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                made = make(*(tensor.array for _, tensor in sorted(inputs.items())))
            finally:
                self.alive -= 1
            return {"y": _tensor("y", made)}

        return call


def _fail(text: str) -> Any:
    def make(*_: Array) -> Array:
        raise CustomNodeFailure(text)

    return make


TWO = [make_node("one", {"i": "request.x"}), make_node("two", {"i": "request.x"})]
BOTH = {"a": "one.y", "b": "two.y"}


async def test_independent_nodes_run_concurrently() -> None:
    begun = {"one": trio.Event(), "two": trio.Event()}

    def meeting(name: str, other: str) -> NodeCall:
        async def call(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
            begun[name].set()
            await begun[other].wait()
            return {"y": inputs["i"]}

        return call

    with trio.fail_after(WAIT_SECONDS):
        found = await _run(TWO, BOTH, {"one": meeting("one", "two"), "two": meeting("two", "one")})
    assert found.keys() == {"a", "b"}


@pytest.mark.parametrize("count", [-1, 3])
async def test_an_input_that_no_node_uses_is_not_split(count: int) -> None:
    assert await _run([], {}, {}, demultiply_count=count) == {}


async def test_shards_run_concurrently() -> None:
    nodes = Nodes()
    x = np.arange(40, dtype=np.float32).reshape(20, 1, 2)
    np.testing.assert_array_equal(await _run_one(nodes.gives(lambda i: i + 1, 3), x, -1), x + 1)
    assert nodes.most == 20


async def test_number_of_concurrent_shards_is_limited() -> None:
    nodes = Nodes()
    there = [
        make_node("one", {"i": "request.x"}, demultiply_count=10),
        make_node("two", {"i": "one.y"}, gather_from_node="one"),
        make_node("three", {"i": "two.y"}),
    ]
    calls = {
        "one": nodes.gives(lambda i: np.stack([i + shard for shard in range(10)]), 1),
        "two": nodes.gives(lambda i: i.sum(axis=0), 2),
        "three": nodes.gives(lambda i: i * 2),
    }
    x = np.arange(300, dtype=np.float32).reshape(300, 1, 1)
    found = await _run(there, {"y": "three.y"}, calls, x, 300)
    np.testing.assert_array_equal(found["y"], (x * 10 + 45) * 2)
    assert (nodes.most, nodes.calls) == (MAX_TASKS, 900)


@pytest.mark.parametrize("steps", [0, 1])
async def test_request_of_many_shards_yields_to_other_tasks(steps: int) -> None:
    nodes = Nodes()
    x = np.zeros((2000, 1, 1), np.float32)
    most = seen = 0

    async def watch() -> None:
        nonlocal most, seen
        while True:
            most, seen = max(most, nodes.calls - seen), nodes.calls
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await _run_one(nodes.gives(lambda i: i, steps), x, -1)
        nursery.cancel_scope.cancel()
    assert nodes.calls == 2000
    assert most <= 2 * MAX_TASKS


@pytest.mark.parametrize("first", ["one", "two"])
async def test_first_failure_cancels_other_nodes(first: str) -> None:
    nodes = Nodes()
    calls = {name: nodes.gives(_fail(name), 1 if name == first else 1000) for name in ("one", "two")}
    calls["three"] = nodes.gives(lambda i: i, 10**9)
    three = [*TWO, make_node("three", {"i": "request.x"})]
    tasks = _tasks()
    with pytest.raises(CustomNodeFailure, match=f"^{first}$"):
        await _run(three, {**BOTH, "c": "three.y"}, calls)
    assert (nodes.alive, _tasks()) == (0, tasks)
    assert _runs() == 0


async def test_failure_of_one_shard_cancels_all() -> None:
    nodes = Nodes()
    failed: list[float] = []

    def fail_at_four(array: Array) -> Array:
        if array[0, 0] == 4:
            failed.append(4)
            raise CustomNodeFailure("four")
        return array

    calls = {
        "outer": nodes.gives(lambda i: np.stack([i + 0, i + 3])),
        "inner": nodes.gives(lambda i: np.stack([i, i + 1, i + 2])),
        "deep": nodes.gives(fail_at_four, 2),
        "last": nodes.gives(lambda i: i.sum(axis=0), 10**9),
    }
    with pytest.raises(CustomNodeFailure, match="four"):
        await _run(NESTED, {"y": "last.y"}, calls, np.zeros((1, 2), np.float32))
    assert failed == [4]
    assert (nodes.alive, _runs()) == (0, 0)


NESTED = [
    make_node("outer", {"i": "request.x"}, demultiply_count=2),
    make_node("inner", {"i": "outer.y"}, demultiply_count=3),
    make_node("deep", {"i": "inner.y"}),
    make_node("last", {"i": "deep.y"}, gather_from_node="inner"),
]


async def _cancel_after(checkpoints: int, scope: trio.CancelScope) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_request_is_cancelled_at_any_point() -> None:
    nodes = Nodes()
    calls = {
        "outer": nodes.gives(lambda i: np.stack([i, i + 10]), 2),
        "inner": nodes.gives(lambda i: np.stack([i, i + 1, i + 2]), 3),
        "deep": nodes.gives(lambda i: i * 2, 3),
        "last": nodes.gives(lambda i: i.sum(axis=0), 2),
    }
    tasks = _tasks()
    most = []
    for checkpoints in range(100):
        nodes.most = 0
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(_cancel_after, checkpoints, scope)
            with scope:
                found = await _run(NESTED, {"y": "last.y"}, calls)
            nursery.cancel_scope.cancel()
        assert (nodes.alive, _tasks()) == (0, tasks)
        most.append(nodes.most)
        if not scope.cancelled_caught:
            break
    assert _runs() == 0
    np.testing.assert_array_equal(found["y"], [[[12, 18]], [[72, 78]]])
    assert {1, 2, 6} <= set(most)
    assert len(most) > 10


async def test_shared_tensors_are_read_only() -> None:
    writeable: dict[str, list[bool]] = {}

    def node(name: str) -> NodeCall:
        async def call(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
            writeable[name] = [tensor.array.flags.writeable for _, tensor in sorted(inputs.items())]
            return {"y": _tensor("y", np.ones((2, 1, 2), np.float32)), "z": _tensor("z", np.ones((1, 2), np.float32))}

        return call

    nodes = [
        make_node("source", {"i": "request.x"}, ("y", "z")),
        make_node("alone", {"i": "source.y"}, ("y", "z")),
        make_node("one", {"i": "source.z"}),
        make_node("two", {"i": "source.z", "j": "alone.z"}),
        make_node("twice", {"i": "alone.y", "j": "alone.y"}),
    ]
    outputs = {"a": "one.y", "b": "two.y", "c": "twice.y"}
    await _run(nodes, outputs, {each.name: node(each.name) for each in nodes})
    assert writeable.pop("source") == writeable.pop("alone") == [True]
    assert writeable == {"one": [False], "two": [False, True], "twice": [False, False]}


@pytest.mark.parametrize("readers", [1, 2])
async def test_shards_of_one_reader_are_writable(readers: int) -> None:
    writeable: list[bool] = []

    async def read(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        (tensor,) = inputs.values()
        writeable.append(tensor.array.flags.writeable)
        if writeable[-1]:
            array = tensor.array
            array += 10
        return {"y": tensor}

    nodes = [make_node(f"n{number}", {"i": "request.x"}) for number in range(readers)]
    outputs = {node.name: f"{node.name}.y" for node in nodes}
    x = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    found = await _run(nodes, outputs, {node.name: read for node in nodes}, x.copy(), 3)
    assert writeable == [readers == 1] * 3 * readers
    np.testing.assert_array_equal(found["n0"], x + 10 * (readers == 1))


@pytest.mark.parametrize("fails", [False, True])
async def test_arrays_are_freed_without_the_garbage_collector(fails: bool) -> None:
    arrays: list[weakref.ref[Array]] = []

    def give(array: Array) -> Array:
        arrays.append(weakref.ref(found := array + 1))
        return found

    nodes = Nodes()
    calls = {"one": nodes.gives(give, 1), "two": nodes.gives(give, 2)}
    three = [*TWO, make_node("three", {"i": "one.y", "j": "two.y"})]
    calls["three"] = nodes.gives(_fail("three") if fails else lambda i, j: i + j)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(CustomNodeFailure) if fails else contextlib.nullcontext():
            found = await _run(three, {**BOTH, "c": "three.y"}, calls)
            assert found["c"].tolist() == [[4, 6]]
            del found
        await trio.lowlevel.checkpoint()
        assert len(arrays) == 2
        assert [each() for each in arrays] == [None, None]
    finally:
        gc.enable()


INVALID: dict[str, tuple[int, list[tuple[int, ...]], str]] = {
    "too few dimensions": (-1, [(2, 2)], r"Wrong number of dimensions .* node 'one' splits 'y' of shape \[2,2\]"),
    "too many shards": (-1, [(MAX_SHARDS + 1, 1, 1)], r"Too large dimension size .* \[10001,1,1\], at most 10000"),
    "another count": (3, [(2, 1, 2)], r"Wrong dimension size .* node 'one' splits into 3: 'y' of shape \[2,1,"),
    "two counts": (-1, [(2, 1, 2), (3, 1, 2)], r"Wrong dimension size .* 'y' of shape \[2,1,2\], 'z' of .*\[3,1,2\]"),
}


def _splitting(shapes: Sequence[tuple[int, ...]]) -> NodeCall:
    async def call(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        return {name: _tensor(name, np.zeros(shape, np.float32)) for name, shape in zip("yz", shapes, strict=False)}

    return call


@pytest.mark.parametrize("case", INVALID)
async def test_outputs_that_cannot_be_split_fail(case: str) -> None:
    count, shapes, text = INVALID[case]
    items = "yz"[: len(shapes)]
    node = make_node("one", {"i": "request.x"}, tuple(items), demultiply_count=count)
    with pytest.raises(PipelineFailure, match=text):
        await _run([node], {item: f"one.{item}" for item in items}, {"one": _splitting(shapes)})


async def test_maximum_number_of_shards() -> None:
    x = np.arange(MAX_SHARDS, dtype=np.float32).reshape(MAX_SHARDS, 1, 1)
    np.testing.assert_array_equal(await _run_one(Nodes().gives(lambda i: i + 1, 1), x, -1), x + 1)


async def test_request_that_cannot_be_split_fails() -> None:
    with pytest.raises(PipelineFailure, match=r"the pipeline splits into 3: 'x' of shape \[2,1,2\]"):
        await _run_one(_splitting([]), np.zeros((2, 1, 2), np.float32), 3)


async def test_empty_output_of_a_demultiplexer_ends_the_call() -> None:
    nodes = Nodes()
    split = make_node("split", {"i": "request.x"}, demultiply_count=-1)
    behind = make_node("behind", {"i": "split.y"})
    calls = {
        "split": _splitting([(0, 1, 2)]),
        "behind": nodes.gives(_fail("never called")),
        "one": nodes.gives(lambda i: i, 10**9),
    }
    with pytest.raises(NothingToGather, match="node 'split' returned nothing to split"):
        await _run([split, behind, TWO[0]], {"y": "behind.y", "z": "one.y"}, calls)
    assert nodes.alive == 0


@pytest.mark.parametrize("other", [np.zeros((1, 3), np.float32), np.zeros((1, 2), np.int32)])
async def test_different_shards_are_not_gathered(other: Array) -> None:
    kinds = {dtype.numpy: dtype for dtype in BY_NAME.values() if dtype.name in ("FP32", "INT32")}

    async def call(inputs: Mapping[str, Tensor], request: InferRequest) -> dict[str, Tensor]:
        array = inputs["i"].array
        output = other if array[0, 0] == 2 else array
        return {"y": Tensor("y", kinds[output.dtype], output)}

    x = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    with pytest.raises(PipelineFailure, match=r"gathering 'y': shard 0 is FP32 \[1,2\], shard 1 is \w+ \[1,[23]\]"):
        await _run_one(call, x, -1)
