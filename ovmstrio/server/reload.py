"""Configuration reloads, by all workers or none."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog

from ovmstrio.core.errors import ModelFailure, ServerError, VersionsFailure
from ovmstrio.serving.broadcast_changes import run_everywhere
from ovmstrio.serving.source import reload_versions

if TYPE_CHECKING:
    from ovmstrio.core.worker_peers import WorkerPeers
    from ovmstrio.server.systemd import Notifier
    from ovmstrio.serving.registry import Registry
    from ovmstrio.serving.source import ConfigSource

log = structlog.get_logger(__name__)

RELOAD: Final = "reload"
RESTORE: Final = "restore"
"""RPC names."""


class Reloader:
    """Reloads of one server."""

    def __init__(
        self, source: ConfigSource | None, registry: Registry, notifier: Notifier, peers: WorkerPeers | None
    ) -> None:
        self._source = source
        self._registry = registry
        self._notifier = notifier
        self._peers = peers

    async def reload(self) -> bool:
        """Reload for a client, in all workers; return whether anything changed.

        A service that fails in all workers is reported as by a single process: everything else is served.  After any
        other failure, all workers restore their previous state.

        Raises:
            ServerError: the reload failed; the message names the worker.
        """
        if self._peers is None:
            return await self.reload_here()
        return await self._peers.run_locked(partial(self._reload_all, self._peers))

    async def poll(self) -> None:
        """Reload if the configuration file has changed; errors are logged."""
        if self._source is None or not await self._source.is_stale():
            return
        if self._peers is None:
            with self._notifier.reloading():
                await self._source.poll()
        else:
            try:
                await self._peers.run_locked(partial(self._reload_stale, self._peers))
            except ServerError as error:
                self._source.note(error)

    async def reload_here(self) -> bool:
        """Reload in this process; as :meth:`reload`."""
        with self._notifier.reloading():
            return await (reload_versions(self._registry) if self._source is None else self._source.reload())

    async def reload_for_peer(self) -> list[Any]:
        """Reload in this process; return whether anything changed, the failed services, and their first error.

        The last item is whether that is an error of a rescan of versions.

        Raises:
            ServerError: the reload failed as a whole.
        """
        try:
            return [await self.reload_here(), [], "", False]
        except ModelFailure as error:
            return [True, self._registry.failed_versions(), error.message, isinstance(error, VersionsFailure)]

    async def rollback_here(self) -> None:
        """Restore the configuration before the last reload in this process.

        Raises:
            ServerError: a service cannot be loaded any more.
        """
        if self._source is not None:
            await self._source.restore()

    async def _reload_stale(self, peers: WorkerPeers) -> None:
        # Another worker may have reloaded meanwhile.
        if self._source is not None and await self._source.is_stale():
            await self._reload_all(peers)

    async def _reload_all(self, peers: WorkerPeers) -> bool:
        others = partial(peers.call_all, RELOAD, limit_seconds=math.inf)
        try:
            result, others_results = await run_everywhere(self.reload_for_peer, others)
            results = [result, *others_results]
            errors = [(VersionsFailure if is_rescan else ModelFailure)(text) for *_, text, is_rescan in results if text]
            if any(failed != results[0][1] for _, failed, *_ in results):
                raise errors[0]
        except ServerError:
            # All workers have started this reload, so none restores the state before an earlier one.
            await self._restore_all(peers)
            raise
        if errors:
            raise errors[0]
        return any(changed for changed, *_ in results)

    async def _try_restore(self) -> None:
        try:
            await self.rollback_here()
        except ServerError as error:
            log.error("rollback failed", reason=error.message)  # noqa: TRY400 - an expected error

    async def _restore_all(self, peers: WorkerPeers) -> None:
        others = partial(peers.call_all, RESTORE, limit_seconds=math.inf)
        try:
            await run_everywhere(self._try_restore, others)
        except ServerError as error:
            log.error("rollback failed on workers", reason=error.message)  # noqa: TRY400 - an expected error
