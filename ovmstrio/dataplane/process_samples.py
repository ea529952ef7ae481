"""What the threads of worker processes do, looked at for a while in all of them at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from ovmstrio.core.census import current_census
from ovmstrio.work.processes import WorkerEnded

if TYPE_CHECKING:
    from ovmstrio.core.census import CountedProcess
    from ovmstrio.core.stacks import SampledThreads

__all__ = ["ProcessSamples"]


class ProcessSamples:
    """Samples of all worker processes that there are when they are taken.

    Attributes:
        threads: what was seen, of each process by itself.
        problems: why a process could not be looked at, by its number.
    """

    def __init__(self) -> None:
        self.threads: list[SampledThreads] = []
        self.problems: dict[int, str] = {}
        self._seen: set[int] = set()

    def problem_of(self, pid: int) -> str:
        """Tell why a process was not looked at; empty if it was."""
        return "" if pid in self._seen else self.problems.get(pid, "it was started meanwhile")

    async def take(self, seconds: float, rate: float) -> None:
        """Look at all of them for so long.

        Args:
            seconds: how long.
            rate: samples a second.

        Cancellation: at once; the processes go on for as long as they were asked to.
        """
        async with trio.open_nursery() as nursery:
            for service, process in current_census().processes():
                if process.pid is not None:
                    nursery.start_soon(self._sample, service, process, process.pid, seconds, rate)

    async def _sample(self, service: str, process: CountedProcess, pid: int, seconds: float, rate: float) -> None:
        try:
            sampled = await process.sample(seconds, rate)
        except WorkerEnded:
            self.problems[pid] = "it ended meanwhile"
        except (OSError, ValueError) as error:
            self.problems[pid] = str(error)
        else:
            self._seen.add(pid)
            for each in sampled:
                each.process, each.service = pid, service
            self.threads += sampled
