"""Sampling profiler of Python threads.

Equal stacks are counted, so that the size of a profile is bounded.  Idle threads are recognized by the function that
they wait in.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ovmstrio.core.service import SampledThreads, StackFrame

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_MAX_STACKS: Final = 20_000
_MOST_FRAMES: Final = 128
"""Innermost frames kept per stack."""
_NANOSECONDS: Final = 1e9
_OTHER_STACKS: Final = "other stacks"

_IDLE_FUNCTIONS: Final = frozenset(
    {
        ("_io_epoll.py", "get_events"),
        ("_thread_cache.py", "_work"),
        ("thread_pool.py", "_work_once"),
        ("threading.py", "wait"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("queue.py", "get"),
        ("selectors.py", "select"),
        ("blocking_channel.py", "_receive_one"),
        ("blocking_channel.py", "wait"),
        ("code_host.py", "_work"),
    }
)
"""Files and functions in which idle threads wait."""


class StackSampler:
    """Sampler of the process's threads; the caller provides the sampling thread.

    Args:
        role: returns the purpose of a thread from its number, its name and the function names of its stack.
        max_stacks: maximum number of different stacks per role.
    """

    def __init__(
        self, rate: float, role: Callable[[int, str, frozenset[str]], str], max_stacks: int = _MAX_STACKS
    ) -> None:
        self._most_stacks = max_stacks
        self._pause = 1 / rate
        self._role = role
        self._stopped = threading.Event()
        self._frames: dict[CodeType, StackFrame] = {}
        self._threads: dict[str, SampledThreads] = {}
        self._cpu: dict[int, tuple[str, float, float]] = {}

    def stop(self) -> None:
        """Make :meth:`run` return; thread-safe."""
        self._stopped.set()

    def run(self, seconds: float) -> list[SampledThreads]:
        """Sample for a time or until :meth:`stop`; blocking.  The calling thread is excluded."""
        own_ident, ends = threading.get_ident(), time.monotonic() + seconds
        while not self._stopped.wait(min(self._pause, max(0.0, ends - time.monotonic()))):
            self._sample(own_ident)
            if time.monotonic() >= ends:
                break
        for role, first, last in self._cpu.values():
            threads = self._threads[role]
            threads.cpu_seconds = (threads.cpu_seconds or 0.0) + last - first
        return sorted(self._threads.values(), key=lambda each: each.waiting - each.samples)

    def _sample(self, own_ident: int) -> None:
        known = {thread.ident: thread for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():  # noqa: SLF001 - the only way there is
            if number == own_ident:
                continue
            codes = _codes_of(frame)
            thread = known.get(number)
            name = "" if thread is None else thread.name
            role = self._role(number, name, frozenset(_name_of(code) for code in codes))
            threads = self._threads.setdefault(role, SampledThreads(role))
            threads.samples += 1
            if (Path(codes[0].co_filename).name, codes[0].co_name) in _IDLE_FUNCTIONS:
                threads.waiting += 1
            else:
                self._count(threads, codes)
            if thread is not None and thread.native_id is not None:
                self._read_cpu_clock(thread.native_id, role)

    def _count(self, threads: SampledThreads, codes: list[CodeType]) -> None:
        stack = tuple(self._frame(code) for code in reversed(codes))
        if stack not in threads.stacks and len(threads.stacks) >= self._most_stacks:
            stack = (StackFrame(_OTHER_STACKS, "", 0),)
        threads.stacks[stack] += 1

    def _frame(self, code: CodeType) -> StackFrame:
        found = self._frames.get(code)
        if found is None:
            found = self._frames[code] = StackFrame(_name_of(code), code.co_filename, code.co_firstlineno)
        return found

    def _read_cpu_clock(self, native: int, role: str) -> None:
        try:
            ran = int(Path(f"/proc/self/task/{native}/schedstat").read_text().split()[0]) / _NANOSECONDS
        except (OSError, IndexError, ValueError):
            return
        _, first, _ = self._cpu.get(native, (role, ran, ran))
        self._cpu[native] = role, first, ran


def _codes_of(frame: FrameType | None) -> list[CodeType]:
    codes: list[CodeType] = []
    while frame is not None and len(codes) < _MOST_FRAMES:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes


def _name_of(code: CodeType) -> str:
    # Python 3.10, which user environments may have, lacks ``co_qualname``.
    return getattr(code, "co_qualname", code.co_name)
