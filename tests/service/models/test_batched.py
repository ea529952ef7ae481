from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import trio
from PIL import Image

from ovmstrio.config.specs import BatchingSpec, LayoutSpec
from ovmstrio.core.errors import InvalidRequest, ModelFailure
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import BY_NAME, Dim
from ovmstrio.models.servable import BatchedServable
from tests.support import ir
from tests.support.servables import RecordingHooks, contents_request, load_batched, raw_request, tensors

HOURS = 3_600_000  # only full batches run


@asynccontextmanager
async def batched(
    model: ov.Model, path: Path, size: int, milliseconds: float = HOURS, *, queue: int = 100, **settings: Any
) -> AsyncIterator[tuple[BatchedServable, RecordingHooks]]:
    hooks = RecordingHooks()
    batching = BatchingSpec(max_batch_size=size, batch_timeout_ms=milliseconds, max_queue_size=queue)
    async with trio.open_nursery() as tasks:
        servable = await load_batched(model, path, tasks, batching, hooks=hooks, **settings)
        yield servable, hooks
        await servable.aclose()


async def call_all(servable: BatchedServable, requests: Sequence[InferRequest]) -> list[Any]:
    """Call all at once, in order; return the first output of each answer, or the error."""
    got: list[Any] = [None] * len(requests)

    async def call(index: int, request: InferRequest, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            got[index] = tensors(await servable.infer(request))[0].array
        except Exception as error:  # noqa: BLE001 - the result of the caller
            got[index] = error

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            await nursery.start(call, index, request)
    return got


def rows(*values: float, width: int = 10) -> InferRequest:
    return raw_request({"b": np.repeat(np.array(values, np.float32)[:, None], width, axis=1)})


async def test_requests_are_joined_and_each_gets_its_rows(tmp_path: Path) -> None:
    async with batched(ir.dummy(), tmp_path, 6) as (servable, hooks):
        got = await call_all(servable, [rows(1), rows(2, 3), rows(4, 5, 6)])
        assert [array[:, 0].tolist() for array in got] == [[2], [3, 4], [5, 6, 7]]
        assert all(array.shape[1] == 10 for array in got)
        assert (hooks.batch_sizes, len(hooks.inferences), len(hooks.queue_times)) == ([6], 1, 3)


async def test_fixed_batch_becomes_a_range_and_an_open_one_stays(tmp_path: Path) -> None:
    async with batched(ir.dummy((1, 10)), tmp_path / "fixed", 2, 0) as (servable, _):
        assert servable.metadata.inputs[0].shape == (Dim(1, 2), Dim.fixed(10))
        with pytest.raises(InvalidRequest, match="Invalid input batch size"):
            await servable.infer(rows(1, 2, 3))
    async with batched(ir.dummy((-1, 10)), tmp_path / "free", 2, 0) as (servable, hooks):
        assert servable.metadata.inputs[0].reported_shape == [-1, 10]
        assert [array[:, 0].tolist() for array in await call_all(servable, [rows(1, 2, 3)])] == [[2, 3, 4]]
        assert hooks.batch_sizes == [3]


async def test_requests_of_different_shapes_are_in_different_batches(tmp_path: Path) -> None:
    async with batched(ir.dynamic(), tmp_path, 2) as (servable, hooks):
        requests = [rows(1, width=3), rows(2, width=5), rows(3, width=3), rows(4, width=5)]
        got = await call_all(servable, requests)
        assert [array.tolist() for array in got] == [[[2.0] * 3], [[3.0] * 5], [[4.0] * 3], [[5.0] * 5]]
        assert hooks.batch_sizes == [2, 2]


async def test_invalid_requests_are_in_no_batch(tmp_path: Path) -> None:
    async with batched(ir.dummy(), tmp_path, 2) as (servable, hooks):
        with pytest.raises(InvalidRequest, match="Invalid input shape"):
            await servable.infer(rows(1, width=9))
        got = await call_all(servable, [rows(1), rows(2, width=11), rows(3)])
        assert isinstance(got[1], InvalidRequest)
        assert [got[0][0, 0], got[2][0, 0]] == [2, 4]
        assert hooks.batch_sizes == [2]


async def test_callers_that_leave_a_running_batch_disturb_no_other_caller(tmp_path: Path) -> None:
    # A batch without callers is stopped, and the model goes on.
    x = ir.parameter("x", [1, 512])
    node, weights = x, op.constant(np.eye(512, dtype=np.float32))
    for _ in range(200):
        node = op.matmul(node, weights, transpose_a=False, transpose_b=False)
    one = np.ones((1, 512), np.float32)
    async with batched(ir.named_model({"y": node}, [x]), tmp_path, 2) as (servable, _):
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
            for array in got:
                np.testing.assert_allclose(array, 2 * one, rtol=1e-3)


async def _cancel_when_running(servable: BatchedServable, scope: trio.CancelScope) -> None:
    while not servable.running:
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_failed_batch_is_run_again_one_by_one(tmp_path: Path) -> None:
    model = ir.matmul()  # z = x y, where a row of y must be there for each column of x
    async with batched(model, tmp_path, 3) as (servable, hooks):
        good = {"x": np.full((1, 1), 3, np.float32), "y": np.full((1, 2), 2, np.float32)}
        got = await call_all(servable, [raw_request(good) for _ in range(3)])
        # Joined, x has three rows of one column, which no three rows of y fit; alone each one is right.
        assert [array.tolist() for array in got] == [[[6.0, 6.0]]] * 3
        assert (hooks.batch_sizes, len(hooks.inferences)) == ([3], 3)


async def test_requests_whose_inputs_differ_in_rows_run_alone(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("datatype", [name for name in BY_NAME if name != "BYTES"])
async def test_every_datatype_is_joined(datatype: str, tmp_path: Path) -> None:
    kind = BY_NAME[datatype].numpy
    values = [np.array([[index % 2, 1, 0]]).astype(kind) for index in range(4)]
    async with batched(ir.passthrough(datatype, (1, 3)), tmp_path, 4) as (servable, hooks):
        got = await call_all(servable, [raw_request({"x": value}, {"x": datatype}) for value in values])
        assert [array.tobytes() for array in got] == [value.tobytes() for value in values]
        assert {array.dtype for array in got} == {kind}
        assert hooks.batch_sizes == [4]


@pytest.mark.parametrize(
    ("model", "name", "shape", "texts"),
    [
        pytest.param(
            ir.string_passthrough((-1, 1)),
            "strings",
            (1, 1),
            [b"a", b"x" * 5000, b"longer", b"y" * 5001],
            id="native, but not with very long ones",
        ),
        pytest.param(
            ir.passthrough("UINT8", (-1, -1), output_name="label_string"),
            "x",
            (1,),
            [b"one", b"three", b"two", b"seven"],
            id="rows of bytes of one width",
        ),
    ],
)
async def test_strings_of_similar_length_are_joined(
    model: ov.Model, name: str, shape: tuple[int, ...], texts: list[bytes], tmp_path: Path
) -> None:
    async with batched(model, tmp_path, 4, 50) as (servable, hooks):
        got = await call_all(servable, [contents_request(name, "BYTES", shape, [text]) for text in texts])
        assert [array.ravel().tolist() for array in got] == [[text] for text in texts]
        assert hooks.batch_sizes == [2, 2]


async def test_encoded_images_are_joined_and_an_invalid_one_is_refused_alone(tmp_path: Path) -> None:
    def image(content: bytes) -> InferRequest:
        return contents_request("image", "BYTES", (1,), [content])

    def png(color: tuple[int, int, int], size: tuple[int, int]) -> InferRequest:
        buffer = BytesIO()
        Image.new("RGB", size, color).save(buffer, "PNG")
        return image(buffer.getvalue())

    async with batched(ir.image_passthrough(), tmp_path, 2) as (servable, hooks):
        got = await call_all(servable, [png((1, 2, 3), (4, 4)), image(b"no image"), png((7, 8, 9), (9, 6))])
        assert got[0].shape == got[2].shape == (1, 4, 4, 3)
        assert [got[0][0, 0, 0].tolist(), got[2][0, 3, 3].tolist()] == [[3, 2, 1], [9, 8, 7]]
        assert isinstance(got[1], InvalidRequest)
        assert hooks.batch_sizes == [2]


async def test_batch_axis_is_that_of_the_layout(tmp_path: Path) -> None:
    model = ir.passthrough("FP32", (3, 1), layout="CN")
    model.outputs[0].node.set_layout(ov.Layout("CN"))
    layouts = {name: LayoutSpec(tensor="CN") for name in "xy"}
    async with batched(model, tmp_path, 4, layouts=layouts) as (servable, hooks):
        values = [np.full((3, count), count, np.float32) for count in (1, 2, 1)]
        got = await call_all(servable, [raw_request({"x": value}) for value in values])
        for array, value in zip(got, values, strict=True):
            np.testing.assert_array_equal(array, value)
        assert hooks.batch_sizes == [4]


async def test_requests_run_alone_if_the_output_cannot_be_divided(tmp_path: Path) -> None:
    x = ir.parameter("x", [-1, 2])
    # There are as many rows as the largest value, which is known at run time only.
    count = op.convert(op.reduce_max(x, np.array([0, 1])), "i64")
    y = op.broadcast(op.constant(np.float32(7)), op.concat([op.unsqueeze(count, 0), op.constant([2])], 0))
    async with batched(ir.named_model({"y": y}, [x]), tmp_path, 2) as (servable, hooks):
        values = [np.full((1, 2), value, np.float32) for value in (1, 3)]
        got = await call_all(servable, [raw_request({"x": value}) for value in values])
        assert [array.tolist() for array in got] == [[[7, 7]], [[7, 7]] * 3]
        assert (hooks.batch_sizes, len(hooks.inferences)) == ([2], 3)
