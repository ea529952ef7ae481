from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.isolation.channel import MessageChannel, PacketSocket, packet_pair
from ovmstrio.isolation.messages import MALFORMED_MESSAGE_ERRORS, MAX_INLINE_BYTES, Region
from ovmstrio.isolation.worker_process import describe_exit_status, describe_probe_exit
from ovmstrio.pipelines.native.library import PRECISIONS


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def ends() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    before = _descriptors()
    one, other = (MessageChannel(end) for end in packet_pair())
    yield one, other
    one.close()
    other.close()
    assert _descriptors() == before


@pytest.fixture
async def raw_ends() -> AsyncIterator[tuple[PacketSocket, MessageChannel]]:
    before = _descriptors()
    raw, end = packet_pair()
    one, other = PacketSocket(raw), MessageChannel(end)
    yield one, other
    one.close()
    other.close()
    assert _descriptors() == before


@pytest.mark.parametrize("count", [3, MAX_INLINE_BYTES])
@pytest.mark.parametrize("dtype", PRECISIONS)
async def test_small_and_large_arrays_arrive_aligned_with_their_types(
    ends: tuple[MessageChannel, MessageChannel], count: int, dtype: np.dtype[Any]
) -> None:
    one, other = ends
    array = (np.arange(count) % 100).astype(dtype)
    await one.send({"x": array, "none": array[:0], "number": array[1:2].reshape(())})
    message = await other.receive()
    assert message is not None
    assert message.descriptor is None
    for name, given in {"x": array, "none": array[:0], "number": array[1]}.items():
        np.testing.assert_array_equal(message.value[name], given)
        assert message.value[name].dtype == dtype
        assert message.value[name].flags.carray


@pytest.mark.parametrize("size", [1, MAX_INLINE_BYTES])
async def test_descriptor_arrives_with_its_message(ends: tuple[MessageChannel, MessageChannel], size: int) -> None:
    one, other = ends
    reader, writer = os.pipe()
    await one.send(bytes(size), writer)
    os.close(writer)
    message = await other.receive()
    assert message is not None
    assert message.value == bytes(size)
    assert message.descriptor is not None
    os.write(message.descriptor, b"x")
    os.close(message.descriptor)
    assert os.read(reader, 2) == b"x"
    os.close(reader)


async def test_finished_channel_delivers_sent_messages_and_still_receives(
    ends: tuple[MessageChannel, MessageChannel],
) -> None:
    one, other = ends
    await one.send("last")
    one.finish()
    received = [await other.receive() for _ in range(3)]
    assert [message and message.value for message in received] == ["last", None, None]
    await other.send("answer")
    answer = await one.receive()
    assert answer is not None
    assert answer.value == "answer"


async def test_closed_channel_raises_on_send_and_receives_the_end(ends: tuple[MessageChannel, MessageChannel]) -> None:
    for closed in reversed(ends):
        closed.close()
        with pytest.raises(trio.BrokenResourceError):
            await ends[0].send("x")
        assert await ends[0].receive() is None


async def test_many_tasks_may_send_before_anything_is_received(ends: tuple[MessageChannel, MessageChannel]) -> None:
    one, other = ends
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one.send, [number, bytes(MAX_INLINE_BYTES // 2)])
        await trio.testing.wait_all_tasks_blocked()
        received = [await other.receive() for _ in range(20)]
    assert sorted(message.value[0] for message in received if message) == list(range(20))


async def test_value_that_cannot_be_sent_sends_nothing(ends: tuple[MessageChannel, MessageChannel]) -> None:
    one, other = ends
    with pytest.raises(TypeError, match=r"not builtins\.object"):
        await one.send([bytes(MAX_INLINE_BYTES), object()])
    one.finish()
    assert await other.receive() is None


@pytest.mark.parametrize(
    ("packet", "content"), [(b"junk", None), (b"i", None), (b"f", None), (b"f", b""), (b"f", b"\xff" * 100)]
)
async def test_invalid_packet_is_refused_and_its_files_are_closed(
    raw_ends: tuple[PacketSocket, MessageChannel], packet: bytes, content: bytes | None
) -> None:
    one, other = raw_ends
    files = []
    if content is not None:
        files = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(2)]
        os.write(files[0], content)
    await one.send(packet, files)
    for file in files:
        os.close(file)
    with pytest.raises(MALFORMED_MESSAGE_ERRORS):
        await other.receive()


async def test_two_descriptors_of_a_small_message_are_refused_and_closed(
    raw_ends: tuple[PacketSocket, MessageChannel],
) -> None:
    one, other = raw_ends
    text = b'["x",[]]'
    reader, writer = os.pipe()
    await one.send(b"i" + len(text).to_bytes(8, "little") + text, [reader, writer])
    os.close(reader)
    os.close(writer)
    with pytest.raises(TypeError):
        await other.receive()


async def test_received_memory_cannot_shrink(raw_ends: tuple[PacketSocket, MessageChannel]) -> None:
    one, other = raw_ends
    end, raw = packet_pair()
    sender, observer = MessageChannel(end), PacketSocket(raw)
    await sender.send(np.ones(MAX_INLINE_BYTES, np.int8))
    received = await observer.receive(64)
    sender.close()
    observer.close()
    assert received is not None
    packet, (file,) = received
    kept = os.dup(file)
    await one.send(packet, [file])
    os.close(file)
    message = await other.receive()
    assert message is not None
    assert fcntl.fcntl(kept, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(kept, 0)
    os.close(kept)
    assert message.value.sum() == MAX_INLINE_BYTES


async def test_deferred_message_precedes_the_next_one(
    ends: tuple[MessageChannel, MessageChannel], autojump_clock: trio.testing.MockClock
) -> None:
    one, other = ends
    count = 0
    while True:
        with trio.move_on_after(1) as scope:
            await one.send(["full", count])
        if scope.cancelled_caught:
            break
        count += 1
    one.send_or_queue("late")
    with trio.move_on_after(1) as scope:
        await one.send("never")
    assert scope.cancelled_caught
    received: list[Any] = []
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.send, "next")
            while "next" not in received:
                message = await other.receive()
                assert message is not None
                received.append(message.value)
    assert received == [*(["full", number] for number in range(count)), "late", "next"]


def test_region_that_cannot_be_created_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises((OSError, OverflowError)):
        Region(1, 2**62)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("describe", "status", "words"),
    [
        (describe_exit_status, 0, "ended with status 0"),
        (describe_exit_status, 3, "ended with status 3"),
        (describe_exit_status, -signal.SIGSEGV, "was killed by SIGSEGV"),
        (describe_exit_status, -99, "was killed by signal 99"),
        (describe_probe_exit, 3, "ended the process with exit code 3"),
        (describe_probe_exit, -signal.SIGSEGV, "crashed with SIGSEGV"),
        (describe_probe_exit, -40, "crashed with signal 40"),
    ],
)
def test_end_of_a_process_is_described_in_words(describe: Callable[[int], str], status: int, words: str) -> None:
    assert describe(status) == words
