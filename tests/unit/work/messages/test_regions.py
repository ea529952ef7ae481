"""Memory that two processes see."""

from __future__ import annotations

import gc
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.work.messages.message_packets import MOST_INLINE, NO_MESSAGE, MessagePackets
from ovmstrio.work.messages.regions import MOST_KEPT, RegionPool, find_shared

LARGE = MOST_INLINE + 1
FILES_OF_REGION = 4
"""Either side has the descriptor, and a copy that its mapping holds."""


class Ends:
    def __init__(self) -> None:
        self.is_full = False
        self.one = MessagePackets(self._to_other)
        self.other = MessagePackets(self._to_one)

    def _to_other(self, packet: bytes) -> bool:
        if not self.is_full:
            assert self.other.read(packet, []) is None
        return not self.is_full

    def _to_one(self, packet: bytes) -> bool:
        if not self.is_full:
            assert self.one.read(packet, []) is None
        return not self.is_full

    def send(self, value: Any, *, back: bool = False) -> Any:
        sender, receiver = (self.other, self.one) if back else (self.one, self.other)
        message = sender.prepare(value)
        packet = message.write()
        received = receiver.read(bytes(packet), [os.dup(file) for file in message.files])
        sender.sent(message)
        for late in sender.backlog():
            assert receiver.read(late, []) is None
        assert received is not None
        return received.value

    def close(self) -> None:
        self.one.close()
        self.other.close()


@pytest.fixture(autouse=True, scope="module")
def only_new_garbage() -> None:
    """Exclude what earlier tests have left from the many collections of this module."""
    gc.freeze()


def open_files() -> int:
    """Count the descriptors of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_region_is_used_again_when_the_last_view_has_gone() -> None:
    """And not before: what somebody looks at stays as it is."""
    before, ends = open_files(), Ends()
    first = ends.send(np.full(LARGE, 1, np.uint8))
    part = first[10:20]
    del first
    second = ends.send(np.full(LARGE, 2, np.uint8))
    assert (set(part), set(second)) == ({1}, {2})
    address = part.__array_interface__["data"][0]
    del part
    third = ends.send(np.full(LARGE, 3, np.uint8))
    span = third.__array_interface__["data"][0]
    assert span <= address < span + LARGE
    assert set(second) == {2}
    del second, third
    ends.close()
    del ends
    assert open_files() == before


def test_many_messages_need_few_regions() -> None:
    """As many as are looked at at once, whatever their sizes."""
    before, ends = open_files(), Ends()
    kept: list[Any] = []
    for number in range(300):
        kept = [*kept[-2:], ends.send(np.full(LARGE + number, number % 256, np.uint8))]
        assert [set(each) for each in kept] == [{(number - back) % 256} for back in range(len(kept))][::-1]
    del kept
    gc.collect()
    assert open_files() <= before + 4 * FILES_OF_REGION
    ends.close()
    del ends
    assert open_files() == before


def test_releases_that_find_no_room_go_before_the_next_message() -> None:
    """None is lost."""
    ends = Ends()
    value = ends.send(np.zeros(LARGE, np.uint8))
    ends.is_full = True
    del value
    files = open_files()
    held = [ends.send(np.zeros(LARGE, np.uint8))]
    assert open_files() > files
    ends.is_full = False
    ends.send(1, back=True)
    files = open_files()
    held.append(ends.send(np.zeros(LARGE, np.uint8)))
    assert open_files() == files
    ends.close()


def test_a_pool_keeps_a_bounded_number_of_bytes() -> None:
    """The oldest regions go first, here and on the other side."""
    before, ends = open_files(), Ends()
    for _ in range(3):
        values = [ends.send(np.zeros(MOST_KEPT // 3, np.uint8)) for _ in range(6)]
        del values
    assert open_files() <= before + 3 * FILES_OF_REGION
    ends.close()
    del ends
    assert open_files() == before


@given(st.lists(st.integers(1, 2**22), max_size=30))
def test_a_region_is_large_enough_and_not_much_larger(sizes: list[int]) -> None:
    """Whatever was asked for before."""
    pool = RegionPool(2**22)
    for size in sizes:
        region = pool.take(size)
        assert size <= region.size <= max(4 * size, 4 * 128 * 1024)
        pool.give_back(region)
        assert pool.kept_bytes <= 2**22
    pool.close()


def test_an_array_from_another_process_goes_on_without_a_copy() -> None:
    """As a whole or in part; what the first end has written is what the third one reads."""
    first, second = Ends(), Ends()
    value = first.send(np.arange(2 * LARGE, dtype=np.uint8))
    assert find_shared(value[3:]) is not None
    assert find_shared(np.zeros(LARGE)) is None
    assert find_shared(value[::2]) is None
    passed = second.send({"all": value, "part": value[5 : 5 + LARGE].reshape(-1, 1), "own": 1})
    value[7] = 99
    assert (passed["all"][7], passed["part"][2, 0]) == (99, 99)
    assert passed["part"].shape == (LARGE, 1)
    del value
    # The second end may still look at the region, which is not used again.
    held = [first.send(np.zeros(2 * LARGE, np.uint8))]
    assert (passed["all"][7], passed["part"][2, 0]) == (99, 99)
    del passed
    files = open_files()
    held.append(first.send(np.zeros(2 * LARGE, np.uint8)))
    assert open_files() == files
    first.close()
    second.close()


PACKETS = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=16).map(lambda rest: b"r" + rest),
    st.binary(max_size=16).map(lambda rest: b"d" + rest),
    st.tuples(*[st.integers(0, 2**20)] * 3, st.integers(0, 2), st.integers(0, 3)).map(
        lambda parts: b"f" + struct.pack("<QQQBB", *parts)
    ),
)


@given(st.lists(PACKETS, max_size=5), st.integers(0, 3))
def test_what_a_mad_process_sends_is_refused(packets: list[bytes], files: int) -> None:
    """With an error that whoever reads it expects; its files are closed."""
    before, end = open_files(), MessagePackets(lambda _: True)
    for packet in packets:
        descriptors = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in range(files)]
        for each in descriptors:
            os.ftruncate(each, 100)
        with suppress(*NO_MESSAGE):
            message = end.read(packet, descriptors)
            if message is not None and message.descriptor is not None:
                os.close(message.descriptor)
            del message
    end.close()
    assert open_files() == before
