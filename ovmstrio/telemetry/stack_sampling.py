"""Where threads of Python are, looked at again and again for a while.

A sample is the stack of each thread at one moment.  Equal stacks are counted, not kept, so that a profile has a bound
whatever its length; a thread that waits for work is told from one that has some by the function that it waits in.
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

__all__ = ["StackSampler"]

_MOST_STACKS: Final = 20_000
_MOST_FRAMES: Final = 128
"""The innermost ones of a stack; the others are left out."""
_NANOSECONDS: Final = 1e9
_ELSE: Final = "other stacks"

_WAITS: Final = frozenset(
    {
        ("_io_epoll.py", "get_events"),
        ("bounded_wakeups.py", "poll"),
        ("_thread_cache.py", "_work"),
        ("worker_threads.py", "_work_once"),
        ("log_writer.py", "_wait"),
        ("threading.py", "wait"),
        ("threading.py", "_wait_for_tstate_lock"),
        ("queue.py", "get"),
        ("selectors.py", "select"),
        ("blocking_channel.py", "_receive_one"),
        ("blocking_channel.py", "wait"),
        ("code_host.py", "_work"),
    }
)
"""Files and functions in which threads wait for something to do."""


class StackSampler:
    """Samples the threads of the process, in a thread that whoever makes it has for it.

    Args:
        rate: samples a second.
        role: says what a thread does, by its number, its name and the names of the functions in its stack.
        most_stacks: how many are told apart for each role.
    """

    def __init__(
        self, rate: float, role: Callable[[int, str, frozenset[str]], str], most_stacks: int = _MOST_STACKS
    ) -> None:
        self._most_stacks = most_stacks
        self._pause = 1 / rate
        self._role = role
        self._stopped = threading.Event()
        self._frames: dict[CodeType, StackFrame] = {}
        self._threads: dict[str, SampledThreads] = {}
        self._cpu: dict[int, tuple[str, float, float]] = {}

    def stop(self) -> None:
        """Have :meth:`run` return at once; from any thread."""
        self._stopped.set()

    def run(self, seconds: float) -> list[SampledThreads]:
        """Sample for so long, or until :meth:`stop`; blocking.  This thread itself is left out."""
        own, ends = threading.get_ident(), time.monotonic() + seconds
        while not self._stopped.wait(min(self._pause, max(0.0, ends - time.monotonic()))):
            self._sample(own)
            if time.monotonic() >= ends:
                break
        for role, first, last in self._cpu.values():
            threads = self._threads[role]
            threads.cpu_seconds = (threads.cpu_seconds or 0.0) + last - first
        return sorted(self._threads.values(), key=lambda each: each.waiting - each.samples)

    def _sample(self, own: int) -> None:
        known = {thread.ident: thread for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():  # noqa: SLF001 - the only way there is
            if number == own:
                continue
            codes = _codes_of(frame)
            thread = known.get(number)
            name = "" if thread is None else thread.name
            role = self._role(number, name, frozenset(_name_of(code) for code in codes))
            threads = self._threads.setdefault(role, SampledThreads(role))
            threads.samples += 1
            if (Path(codes[0].co_filename).name, codes[0].co_name) in _WAITS:
                threads.waiting += 1
            else:
                self._count(threads, codes)
            if thread is not None and thread.native_id is not None:
                self._look_at_clock(thread.native_id, role)

    def _count(self, threads: SampledThreads, codes: list[CodeType]) -> None:
        stack = tuple(self._frame(code) for code in reversed(codes))
        if stack not in threads.stacks and len(threads.stacks) >= self._most_stacks:
            stack = (StackFrame(_ELSE, "", 0),)
        threads.stacks[stack] += 1

    def _frame(self, code: CodeType) -> StackFrame:
        found = self._frames.get(code)
        if found is None:
            found = self._frames[code] = StackFrame(_name_of(code), code.co_filename, code.co_firstlineno)
        return found

    def _look_at_clock(self, native: int, role: str) -> None:
        try:
            ran = int(Path(f"/proc/self/task/{native}/schedstat").read_text().split()[0]) / _NANOSECONDS
        except (OSError, IndexError, ValueError):
            return
        _, first, _ = self._cpu.get(native, (role, ran, ran))
        self._cpu[native] = role, first, ran


def _codes_of(frame: FrameType | None) -> list[CodeType]:
    """Give the functions of a stack, the innermost first."""
    codes: list[CodeType] = []
    while frame is not None and len(codes) < _MOST_FRAMES:
        codes.append(frame.f_code)
        frame = frame.f_back
    return codes


def _name_of(code: CodeType) -> str:
    """Name a function; Python 3.10, which environments of users may have, knows no longer name than its own."""
    return getattr(code, "co_qualname", code.co_name)
