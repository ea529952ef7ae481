"""The health of projects that are served alone: they are there until the server ends."""

from __future__ import annotations

from collections.abc import Collection

import trio

from ovmstrio.api.grpc_standard.health import ServingStatus

__all__ = ["ProjectsHealth"]


class ProjectsHealth:
    """The health of a server whose listener opens only when its handlers are loaded.

    Args:
        services: the full names of what is served.
    """

    def __init__(self, services: Collection[str]) -> None:
        self._known = frozenset(services) | {""}
        self._ending = trio.Event()

    def status(self, service: str) -> ServingStatus:
        """Tell the status of a service, or of the server for an empty name."""
        if service not in self._known:
            return ServingStatus.SERVICE_UNKNOWN
        return ServingStatus.NOT_SERVING if self._ending.is_set() else ServingStatus.SERVING

    async def wait_change(self) -> None:
        """Return when the server ends.

        Cancellation: until then, and for good once that has been told.
        """
        if self._ending.is_set():
            await trio.sleep_forever()
        await self._ending.wait()

    def end(self) -> None:
        """Tell from now on that nothing is served any more."""
        self._ending.set()
