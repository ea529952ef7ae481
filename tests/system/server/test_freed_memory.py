from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc has these settings")

_FREED_TENSORS = """
import resource
import numpy as np
from ovmstrio.server.malloc_trim import configure_malloc

def pages(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        tensors = [np.ones(2**20, np.float32) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages(3)
unset = pages(10)
assert configure_malloc()
pages(3)
print(unset, pages(10))
"""

_FREED_BY_THREADS = """
from threading import Barrier, Thread
import trio
from ovmstrio.server import malloc_trim

assert malloc_trim.configure_malloc()
before = malloc_trim.resident_bytes()
together = Barrier(4)

def allocate():
    together.wait(60)
    held = [b"x" * 2**20 for _ in range(40)]
    together.wait(60)

async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(malloc_trim.trim_freed_memory, trio.sleep_forever)
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as threads:
            for _ in range(4):
                threads.start_soon(trio.to_thread.run_sync, allocate)
        with trio.move_on_after(30):
            while malloc_trim.resident_bytes() > before + 40 * 2**20:
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()

import trio.testing
trio.run(main)
print(malloc_trim.resident_bytes() - before)
"""


def _output_of(program: str) -> list[int]:
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [int(number) for number in ended.stdout.splitlines()[-1].split()]


def test_tensors_reuse_pages_of_freed_tensors() -> None:
    new_pages, new_pages_with_settings = _output_of(_FREED_TENSORS)
    assert new_pages_with_settings < new_pages / 100


@pytest.mark.slow
def test_memory_that_threads_have_freed_is_trimmed() -> None:
    (grown_bytes,) = _output_of(_FREED_BY_THREADS)
    assert grown_bytes <= 40 * 2**20
