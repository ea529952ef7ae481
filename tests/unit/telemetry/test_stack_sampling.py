from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ovmstrio.core.service import SampledThreads
from ovmstrio.isolation.blocking_channel import BlockingChannel
from ovmstrio.isolation.channel import packet_pair
from ovmstrio.telemetry.stack_sampling import StackSampler

SECONDS = 30.0


def _busy(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def _idle(stop: threading.Event) -> None:
    stop.wait(SECONDS)


@contextmanager
def _running(*work: Callable[[threading.Event], None]) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=each, args=(stop,), name=each.__name__) for each in work]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _sampled(samples: int) -> dict[str, SampledThreads]:
    left = samples

    def role(number: int, name: str, functions: frozenset[str]) -> str:
        nonlocal left
        if name == "_busy":
            left -= 1
            if left <= 0:
                sampler.stop()
        return name

    sampler = StackSampler(1000, role)
    return {each.name: each for each in sampler.run(SECONDS)}


def test_samples_of_a_busy_thread_have_its_stack_and_cpu_time() -> None:
    with _running(_busy):
        seen = _sampled(20)["_busy"]
    assert seen.samples >= 20
    in_function = [stack for stack in seen.stacks if any(frame.name == "_busy" for frame in stack)]
    assert in_function
    for stack in in_function:
        names = [frame.name for frame in stack]
        assert names.index("Thread.run") < names.index("_busy")
        assert next(frame for frame in stack if frame.name == "_busy").file == __file__
    assert seen.cpu_seconds is not None
    assert seen.cpu_seconds > 0


def test_samples_of_a_waiting_thread_have_no_stacks() -> None:
    with _running(_busy, _idle):
        seen = _sampled(20)
    idle, busy = seen["_idle"], seen["_busy"]
    assert idle.waiting == idle.samples > 0
    assert not idle.stacks
    assert sum(busy.stacks.values()) == busy.samples - busy.waiting


def test_thread_in_a_blocking_channel_is_waiting() -> None:
    reader, writer = os.pipe()
    ours, theirs = packet_pair()

    def wait(_: threading.Event) -> None:
        BlockingChannel(theirs).wait([reader])

    with ours, theirs, _running(_busy, wait):
        try:
            seen = _sampled(50)
        finally:
            os.write(writer, b"x")
    os.close(reader)
    os.close(writer)
    assert seen["wait"].waiting > 0


def test_sampler_leaves_out_its_own_thread() -> None:
    sampler = StackSampler(1000, lambda number, name, functions: name)
    seen = sampler.run(0.01)
    assert threading.current_thread().name not in {each.name for each in seen}


def _deep(depth: int, stop: threading.Event) -> None:
    if depth:
        _deep(depth - 1, stop)
    else:
        _busy(stop)


def test_deep_stack_keeps_its_innermost_frames() -> None:
    def dig(stop: threading.Event) -> None:
        _deep(400, stop)

    dig.__name__ = "_busy"
    with _running(dig):
        seen = _sampled(5)["_busy"]
    longest = max(seen.stacks, key=len)
    assert len(longest) == 128
    assert longest[0].name == "_deep"
