from __future__ import annotations

import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.events import ApiInterface
from ovmstrio.core.request import InferRequest, InferResponse, RequestedOutput, ServableMetadata
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, BYTES, Array, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.serving.data_plane import DataPlane, ResponseRenderer
from ovmstrio.serving.interfaces import HANDLERS_GRPC, KSERVE_GRPC, KSERVE_REST
from ovmstrio.serving.requested_outputs import classify_large_outputs
from ovmstrio.transport.send_budget import ConnectionBudget, SendBudget, current_connection_budget
from tests.support.stub_registry import StubServable, add_versions, registry_of
from tests.support.waits import Gate, until_async


def _response(elements: int) -> InferResponse:
    return InferResponse("m", "1", [Tensor("out", BY_NAME["FP32"], np.zeros(elements, np.float32))])


def _thread(response: InferResponse) -> int:
    del response
    return threading.get_ident()


def _private(array: Array) -> InferResponse:
    datatype = BYTES if array.dtype == object else BY_NAME["FP32"]
    return InferResponse("m", "1", [Tensor("out", datatype, array)], is_private=True)


class _Labels(tuple[str, ...]):
    __slots__ = ()
    threads: ClassVar[set[int]] = set()

    def __len__(self) -> int:
        self.threads.add(threading.get_ident())
        return super().__len__()


@pytest.mark.parametrize(("elements", "is_on_loop"), [(1000, True), (100_000, False)])
async def test_classes_of_large_outputs_are_ranked_off_the_loop(elements: int, is_on_loop: bool) -> None:
    response = InferResponse("m", "1", [Tensor("out", BY_NAME["FP32"], np.arange(elements, dtype=np.float32))])
    _Labels.threads.clear()
    await classify_large_outputs(response, [RequestedOutput("out", {"classification": 1})], _Labels(["zero"]))
    (only,) = response.outputs
    assert isinstance(only, Tensor)
    assert only.array.tolist() == [f"{elements - 1}.000000:{elements - 1}".encode()]
    assert (_Labels.threads == {threading.get_ident()}) is is_on_loop


@pytest.mark.parametrize(
    ("response", "api_interface", "on_loop"),
    [
        (_response(1000), KSERVE_GRPC, True),
        (_response(500_000), KSERVE_GRPC, True),
        (_response(1_000_000), KSERVE_GRPC, False),
        (_response(1000), KSERVE_REST, True),
        (_response(500_000), KSERVE_REST, False),
        # Large outputs that no one else has, whose elements lie as they are sent, are not copied.
        (_private(np.zeros((1000, 1000), np.float32)), KSERVE_GRPC, True),
        (_private(np.zeros((1000, 1000), np.float32)), KSERVE_REST, False),
        (_private(np.zeros((1000, 1000), np.float32).T), KSERVE_GRPC, False),
        (_private(np.full((400, 1000), b"12345678", object)), KSERVE_GRPC, False),
    ],
)
async def test_large_answers_are_written_in_a_thread(
    response: InferResponse, api_interface: ApiInterface, on_loop: bool
) -> None:
    writer = await ResponseRenderer().render(_thread, response, api_interface)
    assert (writer == threading.get_ident()) is on_loop


def test_size_of_outputs_is_the_sum_of_their_bytes() -> None:
    words = np.array([[b"ab", b""], [b"cde", b"f"]], object)
    outputs: list[Tensor | RawTensor] = [
        Tensor("numbers", BY_NAME["INT16"], np.zeros((2, 3), np.int16)),
        Tensor("words", BYTES, words),
        RawTensor("raw", "FP32", (2,), b"12345678"),
        RawTensor("view", "FP32", (2,), np.zeros(2, np.float32).data),
    ]
    assert [output.nbytes for output in outputs] == [12, 4 * 4 + 6, 8, 8]
    assert InferResponse("m", "1", outputs).nbytes == 50


async def test_two_answers_are_written_at_a_time_and_waiting_can_be_cancelled() -> None:
    renderer, gate = ResponseRenderer(), Gate()

    def write(response: InferResponse) -> None:
        gate.wait()

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(renderer.render, write, _response(1_000_000), KSERVE_GRPC)
        await until_async(lambda: gate.arrivals == 2)
        with trio.move_on_after(0.05) as scope:
            await renderer.render(write, _response(1_000_000), KSERVE_GRPC)
        assert (scope.cancelled_caught, gate.arrivals) == (True, 2)
        gate.set()


class _Computing(StubServable):
    begun = 0
    released: trio.Event

    def __init__(self, spec: ModelSpec, version: int) -> None:
        super().__init__(spec, version)
        size = ANY_SIZE if spec.name == "dynamic" else Dim.fixed(250)
        outputs = (TensorSpec("y", BY_NAME["FP32"], (size,)),)
        self.metadata = ServableMetadata(spec.name, "Stub", (), outputs)

    async def infer(self, request: InferRequest) -> InferResponse:
        type(self).begun += 1
        await self.released.wait()
        return InferResponse(request.model_name, "1", [])


@pytest.fixture
async def plane(nursery: trio.Nursery, tmp_path: Path) -> DataPlane:
    """Return a data plane of ``static``, whose answers have 1,000 bytes, and ``dynamic``, whose size is unknown."""
    _Computing.begun, _Computing.released = 0, trio.Event()

    async def load(spec: ModelSpec, version: int, directory: Path) -> StubServable:
        return _Computing(spec, version)

    registry = registry_of(load, poll_seconds=0)
    await nursery.start(registry.run)
    bases = [add_versions(tmp_path / name, 1) for name in ("static", "dynamic")]
    await registry.apply([ModelSpec(name=base.name, base_path=base) for base in bases])
    return DataPlane(registry)


async def _call(plane: DataPlane, name: str, share: ConnectionBudget | None) -> None:
    current_connection_budget.set(share)
    await plane.infer(InferRequest(name), KSERVE_GRPC, lambda _: (bytes(1_000), 1_000))


async def test_calls_compute_while_their_answers_have_room(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    pending = SendBudget(max_share_bytes=4_500)
    share, other = pending.share(), pending.share()
    for _ in range(300):
        nursery.start_soon(_call, plane, "static", share)
    await trio.testing.wait_all_tasks_blocked()
    assert _Computing.begun == 4
    nursery.start_soon(_call, plane, "static", other)
    await trio.testing.wait_all_tasks_blocked()
    assert _Computing.begun == 5
    _Computing.released.set()
    await trio.testing.wait_all_tasks_blocked()
    assert _Computing.begun == 301
    assert pending.budget.held == 0


async def test_unread_bytes_keep_calls_from_computing(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    share = SendBudget(max_share_bytes=4_500).share()
    share.add(4_000)
    with trio.move_on_after(5) as deadline:
        await _call(plane, "static", share)
    assert deadline.cancelled_caught
    assert (_Computing.begun, share.bytes) == (0, 4_000)
    nursery.start_soon(_call, plane, "static", share)
    await trio.testing.wait_all_tasks_blocked()
    share.release(1_000)
    await trio.testing.wait_all_tasks_blocked()
    assert _Computing.begun == 1


async def test_sixteen_calls_of_unknown_size_compute_in_the_first_second(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    share = SendBudget(max_share_bytes=16_000).share()
    for _ in range(20):
        nursery.start_soon(_call, plane, "dynamic", share)
    await trio.testing.wait_all_tasks_blocked()
    assert _Computing.begun == 16
    await trio.sleep(1.1)
    assert _Computing.begun == 20


async def test_sizes_are_learned_from_answers(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    share = SendBudget(max_share_bytes=3_500).share()
    released, _Computing.released = trio.Event(), trio.Event()
    _Computing.released.set()
    await _call(plane, "dynamic", share)
    _Computing.released = released
    for _ in range(20):
        nursery.start_soon(_call, plane, "dynamic", share)
    await trio.sleep(5)
    assert _Computing.begun == 1 + 3


async def test_calls_without_tensors_and_streams_wait_for_room(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    share = SendBudget(max_share_bytes=1_000).share()
    current_connection_budget.set(share)
    with await plane.call("static", HANDLERS_GRPC, "Get") as call:
        call.event.sent = 900
        assert share.bytes > 0
    assert share.bytes == 0
    with await plane.call("static", HANDLERS_GRPC, "Get"):
        assert share.bytes == 900
        with trio.move_on_after(5) as deadline:
            await plane.call("static", HANDLERS_GRPC, "Get")
        assert deadline.cancelled_caught
        with await plane.call("static", HANDLERS_GRPC, "List", is_stream=True):
            assert share.bytes == 900
        share.add(500)
        assert plane.model_metadata("static", "", KSERVE_GRPC).serving == "1"
        assert plane.model_ready("static", "", KSERVE_GRPC)
        with trio.move_on_after(5) as deadline:
            await plane.call("static", HANDLERS_GRPC, "List", is_stream=True)
        assert deadline.cancelled_caught
