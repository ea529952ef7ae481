"""Counting the calls that a loaded servable has in flight, so that it is closed only after the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from ovmstrio.config.specs import ServableSpec
    from ovmstrio.core.servable import Servable
    from ovmstrio.registry.records import ServiceRecord

__all__ = ["Instance", "Lease"]


class Instance:
    """One loaded servable with the number of calls in flight.

    A version that is loaded again has a new instance; the old one lives until its last lease is given back.
    ``files`` is the mark of what it was loaded from, ``calls`` are the names that it calls, and ``takes`` the calls
    that it takes.
    """

    __slots__ = ("_drained", "calls", "files", "in_flight", "name", "servable", "spec", "takes", "version")

    def __init__(self, record: ServiceRecord, spec: ServableSpec, version: int, servable: Servable, files: str) -> None:
        self.name = spec.name
        self.version = str(version)
        self.spec = spec
        self.servable = servable
        self.files = files
        self.calls = frozenset(call.name for call in record.calls)
        self.takes = record.kind.takes
        self.in_flight = 0
        self._drained: trio.Event | None = None

    def release(self) -> None:
        """Give back one lease; the last one wakes who waits to close the servable."""
        self.in_flight -= 1
        if self.in_flight == 0 and self._drained is not None:
            self._drained.set()

    async def wait_drained(self) -> None:
        """Return once no call is in flight; whoever waits has seen to it that no new lease is given.

        Cancellation: at once; nothing is held.
        """
        if self.in_flight:
            self._drained = self._drained or trio.Event()
            await self._drained.wait()


class Lease:
    """The right to call one servable, which stays open until the lease is given back by leaving its ``with`` block."""

    __slots__ = ("_instance", "kind", "name", "servable", "takes", "version")

    def __init__(self, instance: Instance) -> None:
        instance.in_flight += 1
        self._instance = instance
        self.name = instance.name
        self.version = instance.version
        self.kind = instance.spec.kind
        self.takes = instance.takes
        self.servable = instance.servable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._instance.release()

    def release(self) -> None:
        """Give the lease back, where no block does."""
        self._instance.release()
