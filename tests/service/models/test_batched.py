from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import trio

from ovmstrio.config.specs import BatchingSpec, LayoutSpec, ModelSpec, ShapeSpec
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.errors import InvalidRequest, ModelFailure, Overloaded
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import Dim
from ovmstrio.runtimes.models.batched import BatchedServable
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.answers import tensors
from tests.support.servables import RecordingHooks, contents_request, load_batched, raw_request

HOURS = 3_600_000
"""A time after which no test goes on: only full batches leave."""


@asynccontextmanager
async def batched(
    model: ov.Model, path: Path, size: int, milliseconds: float = HOURS, *, queue: int = 100, **settings: Any
) -> AsyncIterator[tuple[BatchedServable, RecordingHooks]]:
    """Serve a model with batching until the end of the block, with what it tells."""
    hooks = RecordingHooks()
    batching = BatchingSpec(max_batch_size=size, batch_timeout_ms=milliseconds, max_queue_size=queue)
    async with trio.open_nursery() as tasks:
        servable = await load_batched(model, path, tasks, batching, hooks=hooks, **settings)
        yield servable, hooks
        await servable.aclose()


async def call_all(servable: BatchedServable, requests: Sequence[InferRequest]) -> list[Any]:
    """Call at once, in order; gives the first output's array of each answer, or the error."""
    got: list[Any] = [None] * len(requests)

    async def call(index: int, request: InferRequest, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            got[index] = tensors(await servable.infer(request))[0].array
        except Exception as error:  # noqa: BLE001 - it is what the caller got
            got[index] = error

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            await nursery.start(call, index, request)
    return got


def rows(*values: float, width: int = 10) -> InferRequest:
    """Make a request of one row a value."""
    return raw_request({"b": np.repeat(np.array(values, np.float32)[:, None], width, axis=1)})


async def test_requests_are_joined_and_each_gets_its_rows(tmp_path: Path) -> None:
    """Requests of one and more rows run as one inference, and each answer has the rows of its request."""
    async with batched(ir.dummy(), tmp_path, 6) as (servable, hooks):
        got = await call_all(servable, [rows(1), rows(2, 3), rows(4, 5, 6)])
        assert [array[:, 0].tolist() for array in got] == [[2], [3, 4], [5, 6, 7]]
        assert all(array.shape[1] == 10 for array in got)
        assert (hooks.batch_sizes, len(hooks.inferences), len(hooks.queue_times)) == ([6], 1, 3)


async def test_a_lone_request_runs_when_its_time_is_over(tmp_path: Path) -> None:
    """Nothing else comes, so that the batch leaves with one request."""
    async with batched(ir.dummy(), tmp_path, 16, 10) as (servable, hooks):
        response = await servable.infer(rows(1))
        assert (response.model_name, response.model_version) == ("model", "1")
        assert tensors(response)[0].array.tolist() == [[2.0] * 10]
        assert hooks.batch_sizes == [1]
        assert hooks.queue_times[0] >= 0.01


async def test_a_fixed_batch_becomes_a_range_and_a_free_one_stays(tmp_path: Path) -> None:
    """Metadata shows what is taken; more rows than a batch has are refused by a range, and run alone where free."""
    async with batched(ir.dummy((1, 10)), tmp_path / "fixed", 2, 0) as (servable, _):
        assert servable.metadata.inputs[0].shape == (Dim(1, 2), Dim.fixed(10))
        with pytest.raises(InvalidRequest, match="Invalid input batch size"):
            await servable.infer(rows(1, 2, 3))
    async with batched(ir.dummy((-1, 10)), tmp_path / "free", 2, 0) as (servable, hooks):
        assert servable.metadata.inputs[0].reported_shape == [-1, 10]
        assert [array[:, 0].tolist() for array in await call_all(servable, [rows(1, 2, 3)])] == [[2, 3, 4]]
        assert hooks.batch_sizes == [3]


async def test_other_shapes_make_batches_of_their_own(tmp_path: Path) -> None:
    """Requests that differ beyond the batch axis never share an inference."""
    async with batched(ir.dynamic(), tmp_path, 2) as (servable, hooks):
        requests = [rows(1, width=3), rows(2, width=5), rows(3, width=3), rows(4, width=5)]
        got = await call_all(servable, requests)
        assert [array.tolist() for array in got] == [[[2.0] * 3], [[3.0] * 5], [[4.0] * 3], [[5.0] * 5]]
        assert hooks.batch_sizes == [2, 2]


async def test_what_is_refused_is_refused_alone_and_at_once(tmp_path: Path) -> None:
    """A request that does not fit never gets into a batch."""
    async with batched(ir.dummy(), tmp_path, 2) as (servable, hooks):
        with pytest.raises(InvalidRequest, match="Invalid input shape"):
            await servable.infer(rows(1, width=9))
        got = await call_all(servable, [rows(1), rows(2, width=11), rows(3)])
        assert isinstance(got[1], InvalidRequest)
        assert [got[0][0, 0], got[2][0, 0]] == [2, 4]
        assert hooks.batch_sizes == [2]


async def test_a_caller_that_leaves_early_costs_the_others_nothing(tmp_path: Path) -> None:
    """The batch is made of those who stay."""
    async with batched(ir.dummy(), tmp_path, 2) as (servable, hooks):
        async with trio.open_nursery() as leaving:
            leaving.start_soon(servable.infer, rows(1))
            await trio.testing.wait_all_tasks_blocked()
            leaving.cancel_scope.cancel()
        got = await call_all(servable, [rows(2), rows(3)])
        assert [array[0, 0] for array in got] == [3, 4]
        assert hooks.batch_sizes == [2]


async def test_callers_that_leave_while_the_batch_runs(tmp_path: Path) -> None:
    """Whoever stays is answered rightly; a batch that nobody waits for is stopped, and the model goes on."""
    model = _slow()
    one = np.ones((1, 512), np.float32)
    async with batched(model, tmp_path, 2) as (servable, _):
        for stays in (True, False, True):
            got: list[Any] = []

            async def stay(answers: list[Any] = got) -> None:
                answers.append(tensors(await servable.infer(raw_request({"x": 2 * one})))[0].array)

            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:
                    nursery.start_soon(stay)
                    await trio.testing.wait_all_tasks_blocked()
                    nursery.start_soon(_cancel_when_running, servable, scope if stays else nursery.cancel_scope)
                    await servable.infer(raw_request({"x": one}))
                assert scope.cancelled_caught is stays
            assert len(got) == stays
            if stays:
                np.testing.assert_allclose(got[0], 2 * one, rtol=1e-3)


async def _cancel_when_running(servable: BatchedServable, scope: trio.CancelScope) -> None:
    while not servable.running:
        await trio.lowlevel.checkpoint()
    scope.cancel()


def _slow(layers: int = 200) -> ov.Model:
    x = op.parameter([1, 512], np.float32)
    x.output(0).set_names({"x"})
    node: Any = x
    weights = op.constant(np.eye(512, dtype=np.float32))
    for _ in range(layers):
        node = op.matmul(node, weights, transpose_a=False, transpose_b=False)
    node.output(0).set_names({"y"})
    return ov.Model([op.result(node)], [x], "slow_rows")


async def test_only_the_request_at_fault_fails(tmp_path: Path) -> None:
    """A batch that fails is run again one by one."""
    model = ir.matmul()  # z = x y, where a row of y must be there for each column of x
    async with batched(model, tmp_path, 3) as (servable, hooks):
        good = {"x": np.full((1, 1), 3, np.float32), "y": np.full((1, 2), 2, np.float32)}
        got = await call_all(servable, [raw_request(good) for _ in range(3)])
        # Joined, x has three rows of one column, which no three rows of y fit; alone each one is right.
        assert [array.tolist() for array in got] == [[[6.0, 6.0]]] * 3
        assert (hooks.batch_sizes, len(hooks.inferences)) == ([3], 3)


async def test_inputs_whose_rows_do_not_correspond_run_alone(tmp_path: Path) -> None:
    """What the model could take without batching it can take with it; what it cannot is that caller's failure."""
    async with batched(ir.sum_of_two((-1, 2)), tmp_path, 4, 20) as (servable, hooks):
        x, one = np.full((3, 2), 5, np.float32), np.ones((1, 2), np.float32)
        response = await servable.infer(raw_request({"x": x, "y": one}))
        assert [out.array.tolist() for out in tensors(response)] == [[[4.0] * 2] * 3, [[6.0] * 2] * 3]
        with pytest.raises(ModelFailure):
            await servable.infer(raw_request({"x": x, "y": np.ones((2, 2), np.float32)}))
        hooks.batch_sizes.clear()
        await call_all(servable, [raw_request({"x": x[:2], "y": one}), raw_request({"x": one, "y": x[:2]})])
        assert hooks.batch_sizes == [2, 2]
        empty = await servable.infer(raw_request({"x": x[:0], "y": one[:0]}))
        assert empty.outputs[0].shape == (0, 2)


async def test_every_output_is_divided(tmp_path: Path) -> None:
    """A model of two inputs and two outputs answers each caller with its rows of both."""
    async with batched(ir.sum_of_two((1, 2)), tmp_path, 2) as (servable, _):
        answers: dict[int, list[Any]] = {}

        async def call(number: int) -> None:
            x, y = np.full((1, 2), number, np.float32), np.full((1, 2), 10, np.float32)
            answers[number] = [
                out.array.tolist() for out in tensors(await servable.infer(raw_request({"x": x, "y": y})))
            ]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, 1)
            nursery.start_soon(call, 2)
        assert answers == {1: [[[-9.0] * 2], [[11.0] * 2]], 2: [[[-8.0] * 2], [[12.0] * 2]]}


@pytest.mark.parametrize("datatype", [name for name in BY_NAME if name != "BYTES"])
async def test_every_datatype_is_joined(datatype: str, tmp_path: Path) -> None:
    """Joining and dividing keep every bit of every element type."""
    kind = BY_NAME[datatype].numpy
    values = [np.array([[index % 2, 1, 0]]).astype(kind) for index in range(4)]
    async with batched(ir.passthrough(datatype, (1, 3)), tmp_path, 4) as (servable, hooks):
        got = await call_all(servable, [raw_request({"x": value}, {"x": datatype}) for value in values])
        assert [array.tobytes() for array in got] == [value.tobytes() for value in values]
        assert {array.dtype for array in got} == {kind}
        assert hooks.batch_sizes == [4]


async def test_strings_are_joined(tmp_path: Path) -> None:
    """Native strings of any short length share an inference; a very long one does not make the others as long."""
    async with batched(ir.string_passthrough((-1, 1)), tmp_path, 4, 50) as (servable, hooks):
        texts = [b"a", b"x" * 5000, b"longer", b"y" * 5001]
        got = await call_all(servable, [contents_request("strings", "BYTES", (1, 1), [text]) for text in texts])
        assert [array.tolist() for array in got] == [[[text]] for text in texts]
        assert hooks.batch_sizes == [2, 2]


async def test_string_matrices_are_joined_by_width(tmp_path: Path) -> None:
    """Strings as rows of bytes share an inference when they are padded to the same width."""
    model = ir.passthrough("UINT8", (-1, -1), output_name="label_string")
    async with batched(model, tmp_path, 2) as (servable, hooks):
        texts = [b"one", b"three", b"two", b"seven"]
        got = await call_all(servable, [contents_request("x", "BYTES", (1,), [text]) for text in texts])
        assert [array.tolist() for array in got] == [[text] for text in texts]
        assert hooks.batch_sizes == [2, 2]


async def test_encoded_images_are_joined(tmp_path: Path) -> None:
    """Images are decoded and brought to the model's size one by one; one that is none is refused alone."""
    from io import BytesIO

    from PIL import Image

    def png(color: tuple[int, int, int], size: tuple[int, int]) -> InferRequest:
        buffer = BytesIO()
        Image.new("RGB", size, color).save(buffer, "PNG")
        return contents_request("image", "BYTES", (1,), [buffer.getvalue()])

    async with batched(ir.image_passthrough(), tmp_path, 2) as (servable, hooks):
        broken = contents_request("image", "BYTES", (1,), [b"no image"])
        got = await call_all(servable, [png((1, 2, 3), (4, 4)), broken, png((7, 8, 9), (9, 6))])
        assert got[0].shape == got[2].shape == (1, 4, 4, 3)
        assert [got[0][0, 0, 0].tolist(), got[2][0, 3, 3].tolist()] == [[3, 2, 1], [9, 8, 7]]
        assert isinstance(got[1], InvalidRequest)
        assert hooks.batch_sizes == [2]


async def test_a_batch_axis_that_is_not_the_first(tmp_path: Path) -> None:
    """The layout says where rows are."""
    model = ir.passthrough("FP32", (3, 1), layout="CN")
    model.outputs[0].node.set_layout(ov.Layout("CN"))
    async with batched(model, tmp_path, 4, layouts={"x": LayoutSpec(tensor="CN"), "y": LayoutSpec(tensor="CN")}) as (
        servable,
        hooks,
    ):
        values = [np.full((3, count), count, np.float32) for count in (1, 2, 1)]
        got = await call_all(servable, [raw_request({"x": value}) for value in values])
        for array, value in zip(got, values, strict=True):
            np.testing.assert_array_equal(array, value)
        assert hooks.batch_sizes == [4]


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    """No more requests wait than may, and those that wait are answered."""
    async with batched(ir.dummy(), tmp_path, 4, 20, queue=2) as (servable, _):
        got = await call_all(servable, [rows(1), rows(2), rows(3)])
        assert isinstance(got[2], Overloaded)
        assert [got[0][0, 0], got[1][0, 0]] == [2, 3]


async def test_closing(tmp_path: Path) -> None:
    """A closed servable takes nothing in."""
    async with batched(ir.dummy(), tmp_path, 4) as (servable, _):
        pass
    with pytest.raises(trio.ClosedResourceError):
        await servable.infer(rows(1))


async def test_outputs_that_do_not_divide_are_not_mixed_up(tmp_path: Path) -> None:
    """Where the rows of an output are known at run time only, and are others than the inputs', requests run alone."""
    x = op.parameter([-1, 2], np.float32)
    x.output(0).set_names({"x"})
    # As many rows as the largest value says.
    count = op.convert(op.reduce_max(x, np.array([0, 1])), "i64")
    y = op.broadcast(op.constant(np.float32(7)), op.concat([op.unsqueeze(count, 0), op.constant([2])], 0))
    y.output(0).set_names({"y"})
    async with batched(ov.Model([op.result(y)], [x], "counts"), tmp_path, 2) as (servable, hooks):
        values = [np.full((1, 2), value, np.float32) for value in (1, 3)]
        got = await call_all(servable, [raw_request({"x": value}) for value in values])
        assert [array.tolist() for array in got] == [[[7, 7]], [[7, 7]] * 3]
        assert (hooks.batch_sizes, len(hooks.inferences)) == ([2], 3)


async def test_a_nursery_is_needed(tmp_path: Path) -> None:
    """Nothing runs outside the tree of tasks."""
    batching = BatchingSpec(max_batch_size=2, batch_timeout_ms=1)
    base_path = ir.save(ir.dummy(), tmp_path, "model")
    spec = ModelSpec(
        name="model", base_path=base_path, batching=batching, shapes={"b": ShapeSpec(dims=(Dim(2, 3), Dim(10, 10)))}
    )
    with pytest.raises(ValueError, match="needs a nursery"):
        await load_model(spec, 1, base_path / "1")
