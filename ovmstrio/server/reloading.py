"""Reloads of a server, which take over what has changed in its files: by all of its processes, or by none."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from ovmstrio.core.errors import ServerError
from ovmstrio.serving.broadcast_changes import make_side_by_side
from ovmstrio.serving.source import reload_versions

if TYPE_CHECKING:
    from ovmstrio.core.worker_peers import Siblings
    from ovmstrio.server.systemd import Notifier
    from ovmstrio.serving.registry import Registry
    from ovmstrio.serving.source import ConfigSource

__all__ = ["RELOAD", "RESTORE", "Reloading"]

log = structlog.get_logger(__name__)

RELOAD: Final = "reload"
RESTORE: Final = "restore"
"""What processes of one server ask each other."""


class Reloading:
    """Reloads of one server.

    Args:
        source: its configuration; None where it is no file.
        registry: what is served.
        notifier: tells of reloads under way.
        siblings: the other processes, where there are any.
    """

    def __init__(
        self, source: ConfigSource | None, registry: Registry, notifier: Notifier, siblings: Siblings | None
    ) -> None:
        self._source = source
        self._registry = registry
        self._notifier = notifier
        self._siblings = siblings

    async def reload(self) -> bool:
        """Take over what has changed, for a client who asks for it; True if anything has.

        Others do it at the same time.  Where it fails in one process, all go back to what they had.

        Raises:
            ServerError: it has failed; the message tells where.

        Cancellation: leaves it where it is.
        """
        if self._siblings is None:
            return await self.reload_here()
        return await self._siblings.in_turn(partial(self._reload_all, self._siblings))

    async def poll(self) -> None:
        """Take the configuration over if it has changed; what is wrong with it is logged.

        Cancellation: as :meth:`reload`.
        """
        if self._source is None:
            return
        if self._siblings is None:
            await self._source.poll()
        elif await self._source.is_stale():
            try:
                await self._siblings.in_turn(partial(self._reload_stale, self._siblings))
            except ServerError as error:
                self._source.note(error)

    async def reload_here(self) -> bool:
        """Take over what has changed in this process; as :meth:`reload`."""
        with self._notifier.reloading():
            return await (reload_versions(self._registry) if self._source is None else self._source.reload())

    async def restore_here(self) -> None:
        """Go back to what was served before the last reload, as far as that was configured.

        Raises:
            ServerError: some of that cannot be loaded any more.
        """
        if self._source is not None:
            await self._source.restore()

    async def _reload_stale(self, siblings: Siblings) -> None:
        # Another process may have had all do it meanwhile.
        if self._source is not None and await self._source.is_stale():
            await self._reload_all(siblings)

    async def _reload_all(self, siblings: Siblings) -> bool:
        others = partial(siblings.ask_all, RELOAD, limit_seconds=math.inf)
        try:
            changed, changed_there = await make_side_by_side(self.reload_here, others)
        except ServerError:
            # All have begun, and so none goes back to what was before an earlier reload.
            await self._restore_all(siblings)
            raise
        return any([changed, *changed_there])

    async def _go_back(self) -> None:
        """Have this process go back; what goes wrong with that is logged."""
        try:
            await self.restore_here()
        except ServerError as error:
            log.error("what was served before cannot be served again", reason=error.message)  # noqa: TRY400 - told

    async def _restore_all(self, siblings: Siblings) -> None:
        """Have all processes go back; what goes wrong with that is logged."""
        others = partial(siblings.ask_all, RESTORE, limit_seconds=math.inf)
        try:
            await make_side_by_side(self._go_back, others)
        except ServerError as error:
            log.error("what was served before cannot be served again by all", reason=error.message)  # noqa: TRY400 - told
