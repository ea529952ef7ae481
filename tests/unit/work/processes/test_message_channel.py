"""Messages between processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.runtimes.pipelines.custom_nodes.native.abi import PRECISIONS
from ovmstrio.work.messages.message_packets import MOST_INLINE, NO_MESSAGE
from ovmstrio.work.processes.message_channel import MessageChannel
from ovmstrio.work.processes.packet_socket import PacketSocket, packet_pair


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
async def ends() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    """Give the two ends; no descriptor is left of them."""
    before = _descriptors()
    one, other = (MessageChannel(end) for end in packet_pair())
    yield one, other
    one.close()
    other.close()
    assert _descriptors() == before


@pytest.fixture
async def raw_ends() -> AsyncIterator[tuple[PacketSocket, MessageChannel]]:
    """Return a socket that sends any packet, and the channel that receives it."""
    before = _descriptors()
    raw, end = packet_pair()
    one, other = PacketSocket(raw), MessageChannel(end)
    yield one, other
    one.close()
    other.close()
    assert _descriptors() == before


@pytest.mark.parametrize("count", [3, MOST_INLINE])
@pytest.mark.parametrize("dtype", PRECISIONS)
async def test_small_and_large_messages_arrive(
    ends: tuple[MessageChannel, MessageChannel], count: int, dtype: np.dtype[Any]
) -> None:
    """As what they were, with arrays that are aligned and the receiver's own."""
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


@pytest.mark.parametrize("size", [1, MOST_INLINE])
async def test_a_descriptor_goes_along(ends: tuple[MessageChannel, MessageChannel], size: int) -> None:
    """With small messages and with large ones; both have one then."""
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


async def test_many_tasks_may_send(ends: tuple[MessageChannel, MessageChannel]) -> None:
    """Although nobody receives yet, and more than there is room for."""
    one, other = ends
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(one.send, [number, bytes(MOST_INLINE // 2)])
        await trio.testing.wait_all_tasks_blocked()
        received = [await other.receive() for _ in range(20)]
    assert sorted(message.value[0] for message in received if message) == list(range(20))


async def test_what_cannot_be_sent_is_not_sent(ends: tuple[MessageChannel, MessageChannel]) -> None:
    """Nor is anything of it."""
    one, other = ends
    with pytest.raises(TypeError, match=r"not builtins\.object"):
        await one.send([bytes(MOST_INLINE), object()])
    one.finish()
    assert await other.receive() is None


@pytest.mark.parametrize(
    ("packet", "content"), [(b"junk", None), (b"i", None), (b"f", None), (b"f", b""), (b"f", b"\xff" * 100)]
)
async def test_what_is_no_message_is_refused(
    raw_ends: tuple[PacketSocket, MessageChannel], packet: bytes, content: bytes | None
) -> None:
    """And no file that came with it stays open."""
    one, other = raw_ends
    files = []
    if content is not None:
        files = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(2)]
        os.write(files[0], content)
    await one.send(packet, files)
    for file in files:
        os.close(file)
    with pytest.raises(NO_MESSAGE):
        await other.receive()


async def test_more_descriptors_than_one_are_refused(raw_ends: tuple[PacketSocket, MessageChannel]) -> None:
    """And closed."""
    one, other = raw_ends
    text = b'["x",[]]'
    reader, writer = os.pipe()
    await one.send(b"i" + len(text).to_bytes(8, "little") + text, [reader, writer])
    os.close(reader)
    os.close(writer)
    with pytest.raises(TypeError):
        await other.receive()


async def test_memory_that_is_in_use_cannot_be_taken_away(raw_ends: tuple[PacketSocket, MessageChannel]) -> None:
    """The sender may have kept the file open."""
    one, other = raw_ends
    end, raw = packet_pair()
    sender, observer = MessageChannel(end), PacketSocket(raw)
    await sender.send(np.ones(MOST_INLINE, np.int8))
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
    assert message.value.sum() == MOST_INLINE


async def test_what_has_no_room_now_goes_before_the_next_message(
    ends: tuple[MessageChannel, MessageChannel], autojump_clock: trio.testing.MockClock
) -> None:
    """Also where who sent the next one left before there was room."""
    one, other = ends
    count = 0
    while True:
        with trio.move_on_after(1) as scope:
            await one.send(["full", count])
        if scope.cancelled_caught:
            break
        count += 1
    one.send_later("late")
    with trio.move_on_after(1) as scope:
        await one.send("never")
    assert scope.cancelled_caught
    received: list[Any] = []

    async def receive() -> None:
        while not received or received[-1] != "next":
            message = await other.receive()
            assert message is not None
            received.append(message.value)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await one.send("next")
    assert received == [*(["full", number] for number in range(count)), "late", "next"]
