from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.wire.grpc.messages import MessageBuffer
from tests.unit.wire.grpc.bytes_client import message


@given(st.lists(st.binary(max_size=30)), st.lists(st.integers(1, 200)), st.booleans())
def test_messages_are_complete_and_in_order_however_the_bytes_are_split(
    payloads: list[bytes], cuts: list[int], eager: bool
) -> None:
    stream = b"".join(map(message, payloads))
    buffer = MessageBuffer()
    taken = []
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        buffer.append(stream[start:end])
        while eager and (item := buffer.take(30)) is not None:
            taken.append(item)
    while (item := buffer.take(30)) is not None:
        taken.append(item)
    assert taken == [(0, payload) for payload in payloads]
    assert buffer.size == 0


@given(st.integers(60_000, 200_000), st.lists(st.integers(1, 200_000)), st.binary(max_size=10))
def test_a_large_message_is_readonly_with_an_aligned_end_however_it_is_split(
    size: int, cuts: list[int], other: bytes
) -> None:
    payloads = [other, np.arange(size, dtype=np.uint8).tobytes(), other]
    stream = b"".join(map(message, payloads))
    buffer = MessageBuffer()
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        buffer.append(memoryview(stream)[start:end])
    taken = [buffer.take_aligned(200_000) for _ in payloads]
    assert [(each[0], bytes(each[1])) for each in taken if each] == [(0, payload) for payload in payloads]
    assert buffer.take_aligned(200_000) is None
    assert [type(each[1]) for each in taken if each] == [bytes, memoryview if size >= 2**16 else bytes, bytes]
    large = taken[1][1] if taken[1] else b""
    if isinstance(large, memoryview):
        assert large.readonly
        assert (np.frombuffer(large, np.uint8).ctypes.data + size) % 64 == 0


def test_bytes_received_in_small_parts_use_little_more_memory_than_their_size() -> None:
    buffer, crumb = MessageBuffer(), message(bytes(200_000))
    tracemalloc.start()
    try:
        for start in range(0, len(crumb), 2):
            buffer.append(crumb[start : start + 2])
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * len(crumb)
    assert buffer.take(200_000) == (0, bytes(200_000))


def test_an_announced_size_above_the_limit_is_refused_before_it_arrives() -> None:
    buffer = MessageBuffer()
    buffer.append(b"\0" + (1_001).to_bytes(4, "big"))
    with pytest.raises(GRPCError) as caught:
        buffer.take(1_000)
    assert caught.value.status is Status.RESOURCE_EXHAUSTED
