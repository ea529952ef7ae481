"""Calls that wait before they compute, because answers for their client have no room."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.api.doors import HANDLERS_GRPC, KSERVE_GRPC
from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.pending_answers import PendingAnswers, PendingShare, current_share
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.tensor import ANY_SIZE, Dim, TensorSpec
from ovmstrio.dataplane.answer_room import AnswerRoom
from ovmstrio.dataplane.plane import DataPlane
from tests.support.stub_registry import StubServable, registry_of


class Computing(StubServable):
    """Computes until the test lets it answer."""

    begun = 0
    released: trio.Event

    def __init__(self, spec: ModelSpec, version: int) -> None:
        super().__init__(spec, version)
        size = ANY_SIZE if spec.name == "dynamic" else Dim.fixed(250)
        outputs = (TensorSpec("y", BY_NAME["FP32"], (size,)),)
        self.metadata = ServableMetadata(spec.name, "Stub", (), outputs)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Compute."""
        type(self).begun += 1
        await self.released.wait()
        return InferResponse(request.model_name, "1", [])


@pytest.fixture
async def plane(nursery: trio.Nursery, tmp_path: Path) -> DataPlane:
    """A plane over a model whose answers have 1,000 bytes, and one of whose answers nothing is known."""
    Computing.begun, Computing.released = 0, trio.Event()

    async def load(spec: ModelSpec, version: int, directory: Path) -> StubServable:
        return Computing(spec, version)

    registry = registry_of(load, poll_seconds=0)
    await nursery.start(registry.run)
    for name in ("static", "dynamic"):
        (tmp_path / name / "1").mkdir(parents=True)
    await registry.apply([ModelSpec(name=name, base_path=tmp_path / name) for name in ("static", "dynamic")])
    return DataPlane(registry)


def _rendered(_response: InferResponse) -> tuple[bytes, int]:
    return bytes(1_000), 1_000


async def _call(plane: DataPlane, name: str, share: PendingShare | None) -> None:
    current_share.set(share)
    await plane.infer(InferRequest(name), KSERVE_GRPC, _rendered)


async def test_as_many_calls_compute_as_their_answers_have_room(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    """Of three hundred at once those run whose answers fit into the share, one of another connection beside."""
    pending = PendingAnswers(max_share_bytes=4_500)
    share, other = pending.share(), pending.share()
    for _ in range(300):
        nursery.start_soon(_call, plane, "static", share)
    await trio.testing.wait_all_tasks_blocked()
    assert Computing.begun == 4
    nursery.start_soon(_call, plane, "static", other)
    await trio.testing.wait_all_tasks_blocked()
    assert Computing.begun == 5
    Computing.released.set()
    await trio.testing.wait_all_tasks_blocked()
    assert Computing.begun == 301
    assert pending.budget.held == 0


async def test_bytes_that_nobody_reads_keep_calls_from_computing(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    """What waits for the client counts as what is about to; a call that leaves while it waits holds nothing."""
    share = PendingAnswers(max_share_bytes=4_500).share()
    share.add(4_000)
    with trio.move_on_after(5) as deadline:
        await _call(plane, "static", share)
    assert deadline.cancelled_caught
    assert (Computing.begun, share.bytes) == (0, 4_000)
    nursery.start_soon(_call, plane, "static", share)
    await trio.testing.wait_all_tasks_blocked()
    share.give_back(1_000)
    await trio.testing.wait_all_tasks_blocked()
    assert Computing.begun == 1


async def test_answers_of_unknown_size_wait_for_the_first_for_a_second(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    """At first sixteen run; the others as soon as the size is known, and in any case soon: they may need each other."""
    share = PendingAnswers(max_share_bytes=16_000).share()
    for _ in range(20):
        nursery.start_soon(_call, plane, "dynamic", share)
    await trio.testing.wait_all_tasks_blocked()
    assert Computing.begun == 16
    await trio.sleep(1.1)
    assert Computing.begun == 20


async def test_sizes_are_learned_from_answers(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    """After the first answer of a model its size is what further calls need."""
    share = PendingAnswers(max_share_bytes=3_500).share()
    released, Computing.released = trio.Event(), trio.Event()
    Computing.released.set()
    await _call(plane, "dynamic", share)
    Computing.released = released
    for _ in range(20):
        nursery.start_soon(_call, plane, "dynamic", share)
    await trio.sleep(5)
    assert Computing.begun == 1 + 3


async def test_calls_without_tensors_wait_as_well(
    autojump_clock: MockClock, nursery: trio.Nursery, plane: DataPlane
) -> None:
    """One that has ended made room for the next; streams need room at their begin only, and hold none."""
    share = PendingAnswers(max_share_bytes=1_000).share()
    current_share.set(share)
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
        with trio.move_on_after(5) as deadline:
            await plane.call("static", HANDLERS_GRPC, "List", is_stream=True)
        assert deadline.cancelled_caught


async def test_questions_do_not_wait(autojump_clock: MockClock, plane: DataPlane) -> None:
    """What asks about the server is outside of it."""
    share = PendingAnswers(max_share_bytes=10).share()
    share.add(1_000_000)
    current_share.set(share)
    assert plane.model_metadata("static", "", KSERVE_GRPC).serving == "1"
    assert plane.model_ready("static", "", KSERVE_GRPC)


def test_sizes_follow_what_answers_become() -> None:
    """A larger answer counts at once, smaller ones lower the expectation little by little."""
    room = AnswerRoom()
    room.learn("m", 64_000)
    room.learn("m", 1_000)
    assert room.sizes["m"] == 63_000
    for _ in range(500):
        room.learn("m", 1_000)
    assert room.sizes["m"] < 1_100
    room.learn("m", 5_000)
    assert room.sizes["m"] == 5_000
