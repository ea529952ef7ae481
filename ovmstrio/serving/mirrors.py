"""Local copies of remote model repositories (object stores, hubs, web servers), updated while the server runs.

::

    Registry.apply ─> Mirrors.follow ─> a task per address ─> worker thread ─> store
                          │ changed or failed                  (abandoned if the store hangs)
    Registry <────────────┘ reconciles; loads read local files only
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, ServerError, StorageFailure
from ovmstrio.stores.mirror import Mirror, evict
from ovmstrio.stores.storage import STALL_SECONDS
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.progress import Progress, no_progress

if TYPE_CHECKING:
    from ovmstrio.config.specs import ServableSpec, VersionPolicy
    from ovmstrio.stores.address import Address

log = structlog.get_logger(__name__)

_HUB_STALL_FACTOR: Final = 10
_FIRST_RETRY_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 60.0


async def update_mirror(
    mirror: Mirror,
    policies: Iterable[VersionPolicy] = (),
    progress: Progress = no_progress,
    stall_seconds: float = STALL_SECONDS,
) -> bool:
    """Download what has changed at an address; return whether anything has.

    Args:
        mirror: the local copy.
        policies: select the versions of a model; all without any.
        progress: receives progress, from a worker thread.
        stall_seconds: longest time without progress.

    Raises:
        ConfigError: the package of the store is not installed.
        StorageFailure: the store or the disk failed, or sent nothing for ``stall_seconds``.

    Cancellation: immediate; the worker thread ends at its next chunk.
    """
    moved = time.monotonic()
    # The hub's client limits stalls itself, and reports progress in pieces of 10 MB.
    stall_seconds *= _HUB_STALL_FACTOR if mirror.address.family == "hf" else 1

    def note(name: str, done: int, total: int | None) -> None:
        nonlocal moved
        moved = time.monotonic()
        progress(name, done, total)

    chosen = tuple(policies)
    update = partial(mirror.update, partial(_select_versions, chosen) if chosen else list, note)
    changed: bool | None = None
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            while (left := moved + stall_seconds - time.monotonic()) > 0:  # noqa: ASYNC110 - a thread moves the time
                await trio.sleep(left)
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        try:
            # A separate limiter, because the thread of a hanging store does not end.
            limiter = trio.CapacityLimiter(1)
            changed = await trio.to_thread.run_sync(update, abandon_on_cancel=True, limiter=limiter)
        except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery
            failure = error
        finally:
            mirror.stop()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if changed is None:
        raise StorageFailure(f"{mirror.address} sent no data for {stall_seconds:g} s")
    return changed


def _select_versions(policies: Sequence[VersionPolicy], versions: Iterable[int]) -> set[int]:
    listed = list(versions)
    return {version for policy in policies for version in policy.select(listed)}


def _reason(error: Exception, address: Address) -> str:
    """Return the text of a failed download, and log an exception of an unexpected type."""
    if isinstance(error, ServerError):
        return error.message
    if not isinstance(error, OSError):
        log.warning("download raised", address=str(address), exc_info=error)
    return str(error) or type(error).__name__


class _MirroredAddress:
    """Remote address with its local copy, download progress and last failure."""

    def __init__(self, address: Address, policies: tuple[VersionPolicy, ...]) -> None:
        self.mirror = Mirror(address)
        self.policies = policies
        self.check_requested = trio.Event()
        self.failure = ""
        self.progress = ""
        self.scope = trio.CancelScope()

    def note(self, _: str, done: int, total: int | None) -> None:
        share = f" of {total / 1e6:,.0f}" if total else ""
        self.progress = f", {done / 1e6:,.0f}{share} MB"

    async def pause(self, seconds: float) -> None:
        """Wait until a check is requested, at most for ``seconds``."""
        with trio.move_on_after(seconds):
            await self.check_requested.wait()
        self.check_requested = trio.Event()


class Mirrors:
    """Keeps the local copies of followed addresses up to date.

    Failures keep the last complete copy, and are logged at the first one and at the recovery.

    Args:
        on_change: called after a change of files, and when an address without a copy fails.
        poll_seconds: interval of checks for changes; 0 downloads each address once.
        cache_bytes: size above which copies of other addresses are removed.
        progress: receives progress.
    """

    def __init__(
        self,
        on_change: Callable[[], Awaitable[object]],
        *,
        poll_seconds: float = 60.0,
        cache_bytes: float = math.inf,
        progress: Progress = no_progress,
    ) -> None:
        self._on_change = on_change
        self._poll_seconds = poll_seconds
        self._cache_bytes = cache_bytes
        self._progress = progress
        self._followed: dict[Address, _MirroredAddress] = {}
        self._nursery: trio.Nursery | None = None
        self._extra_addresses: tuple[Address, ...] = ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the tasks of followed addresses until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def add(self, *addresses: Address) -> None:
        """Follow addresses that belong to no service, such as that of the configuration file."""
        self._extra_addresses += addresses

    def follow(self, specs: Iterable[ServableSpec]) -> None:
        """Follow exactly the addresses of these services."""
        policies: dict[Address, tuple[VersionPolicy, ...]] = dict.fromkeys(self._extra_addresses, ())
        for spec in specs:
            for address in spec.sources:
                policies[address] = (*policies.get(address, ()), spec.version_policy)
        for address in self._followed.keys() - policies.keys():
            self._followed.pop(address).scope.cancel()
        for address, chosen in policies.items():
            each = self._followed.get(address)
            if each is not None and each.policies != chosen:
                each.policies = chosen
                each.check_requested.set()
            elif each is None and self._nursery is not None:
                self._followed[address] = _MirroredAddress(address, chosen)
                self._nursery.start_soon(self._keep_current, self._followed[address])

    def request_check(self) -> None:
        """Check all stores for changes now, without waiting for them."""
        for each in self._followed.values():
            each.check_requested.set()

    def unready_reason(self, spec: ServableSpec) -> tuple[str, bool] | None:
        """Return why a service's files are unavailable, and whether the download failed; None if they are available."""
        for address in spec.sources:
            each = self._followed.get(address)
            if each is not None and not each.mirror.is_usable:
                if each.failure:
                    return each.failure, True
                return f"{address} is downloading{each.progress}", False
        return None

    async def _keep_current(self, each: _MirroredAddress) -> None:
        mirror = each.mirror
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)

        def note(name: str, done: int, total: int | None) -> None:
            each.note(name, done, total)
            self._progress(name, done, total)

        with each.scope:
            try:
                while True:
                    had_copy = mirror.is_usable
                    try:
                        await trio.to_thread.run_sync(mirror.keep, abandon_on_cancel=True)
                        changed = await update_mirror(mirror, each.policies, note)
                    except Exception as error:  # noqa: BLE001 - clients of stores raise many types
                        reason = _reason(error, mirror.address)
                        if not each.failure:
                            log.warning("store unreachable", address=str(mirror.address), reason=reason)
                        is_new, each.failure = each.failure != reason, reason
                        if is_new and not mirror.is_usable:
                            await self._on_change()
                        if isinstance(error, ConfigError):
                            return
                        pause = backoff.seconds_after()
                        await each.pause(max(pause, self._poll_seconds) if mirror.is_usable else pause)
                        continue
                    if each.failure:
                        log.info("store reachable", address=str(mirror.address))
                    each.failure, each.progress = "", ""
                    backoff.reset()
                    if changed or not had_copy:
                        log.info("files downloaded", address=str(mirror.address), path=str(mirror.address.path))
                        await self._on_change()
                        await self._evict()
                    is_last = mirror.address.is_immutable or not self._poll_seconds
                    await each.pause(math.inf if is_last else self._poll_seconds)
            finally:
                mirror.stop()
                mirror.release()

    async def _evict(self) -> None:
        if math.isfinite(self._cache_bytes):
            removed = await trio.to_thread.run_sync(evict, int(self._cache_bytes), abandon_on_cancel=True)
            if removed:
                log.info("downloads removed", folders=removed)
