"""Where the user's object of a Python node lives, and how it is called there: one port, whatever the place.

::

    NodeInThreads     in this process: plain code in the graph's worker threads, async code on the event loop
    NodeInProcesses   in worker processes
"""

from __future__ import annotations

from typing import Protocol

from ovmstrio.runtimes.graphs.calculator import InstanceContext
from ovmstrio.runtimes.graphs.calculators.python.python_outputs import Outputs
from ovmstrio.work.user_code.places import SourceLine
from ovmstrio.work.user_code.pumps import Pump
from pyovms import Tensor

__all__ = ["InstanceCode", "NodeCode"]


class InstanceCode(Protocol):
    """The object's calls for one call or stream.

    All raise ``UserCodeRaisedError`` with what the user's code raised, ``WorkerEnded`` if its process has ended, and
    are told to stop when they are cancelled.
    """

    async def open(self) -> None:
        """Run the hook ``open``, where there is one."""
        ...

    async def execute(self, inputs: list[Tensor]) -> Outputs | Pump[Outputs]:
        """Run ``execute``; a generator that it gives is the caller's to close.

        Raises:
            UserCodeRaisedError: with a ``WrongOutputError`` if it gave what cannot be sent.
        """
        ...

    def stop(self) -> None:
        """Tell the context that nobody wants a result any more."""
        ...

    async def close(self) -> None:
        """Run the hook ``close``, where there is one, and forget the instance."""
        ...


class NodeCode(Protocol):
    """The object."""

    async def load(self) -> None:
        """Make it and initialize it.

        Raises:
            UserCodeRaisedError: the user's code raised, or is not there (a ``ConfigError``).
            WorkerEnded: its process ended.
            OSError: no process can be started.
        """
        ...

    async def finalize(self) -> None:
        """Run ``finalize``, where it has one.

        Raises:
            UserCodeRaisedError: it raised.
            RuntimeError: it cannot run any more.
        """
        ...

    async def aclose(self) -> None:
        """Forget everything.  Cancellation: shielded, for it is bounded."""
        ...

    def instance(self, context: InstanceContext) -> InstanceCode:
        """Make what calls it for one call or stream."""
        ...

    def place_of(self, method: str) -> SourceLine | None:
        """Give the line where a method is defined, if that is known."""
        ...
