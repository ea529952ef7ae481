"""Packets between processes, and the files in memory that go with them."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

import pytest
import trio

from ovmstrio.work.messages.regions import MappedFile, Region
from ovmstrio.work.processes.packet_socket import PacketSocket, packet_pair
from ovmstrio.work.processes.program import describe_end


def _ends() -> tuple[PacketSocket, PacketSocket]:
    ours, theirs = packet_pair()
    return PacketSocket(ours), PacketSocket(theirs)


async def test_packets_keep_their_borders() -> None:
    """However many are sent before the first is received."""
    one, other = _ends()
    for packet in (b"first", bytearray(b"second")):
        await one.send(packet)
    assert [await other.receive(64), await other.receive(64)] == [(b"first", []), (b"second", [])]
    one.close()
    other.close()


async def test_a_file_goes_with_a_packet() -> None:
    """What was written is read on the other side, when the sender has closed its own descriptor long since."""
    one, other = _ends()
    region = Region(1, 8)
    region.bytes[:] = b"contents"
    await one.send(b"x", [region.file])
    region.close()
    received = await other.receive(1)
    assert received is not None
    packet, (theirs,) = received
    mapped = MappedFile(theirs)
    assert (packet, mapped.bytes.tobytes()) == (b"x", b"contents")
    del mapped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(theirs)
    one.close()
    other.close()


async def test_a_mapped_file_cannot_shrink() -> None:
    """Memory that is in use stays, whatever its writer does."""
    region = Region(1, mmap.PAGESIZE)
    mapped = MappedFile(os.dup(region.file))
    with pytest.raises(PermissionError):
        os.ftruncate(region.file, 0)
    region.close()
    assert mapped.bytes.sum() == 0


def test_a_region_that_cannot_be_made_is_closed() -> None:
    """No descriptor is lost."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises((OSError, OverflowError)):
        Region(1, 2**62)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_what_was_sent_is_received_after_the_end() -> None:
    """Then None, as often as it is asked."""
    one, other = _ends()
    await one.send(b"last")
    one.finish()
    assert [await other.receive(9), await other.receive(9), await other.receive(9)] == [(b"last", []), None, None]
    await other.send(b"answer")
    assert await one.receive(9) == (b"answer", [])
    one.close()
    other.close()


async def test_an_end_that_is_gone_is_told() -> None:
    """To senders as an error, to receivers as the end."""
    one, other = _ends()
    other.close()
    with pytest.raises(trio.BrokenResourceError):
        await one.send(b"x")
    assert await one.receive(1) is None
    one.close()
    with pytest.raises(trio.BrokenResourceError):
        await one.send(b"x")
    assert await one.receive(1) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(status: int, words: str) -> None:
    """Signals by their names, where they have one."""
    assert describe_end(status) == words
