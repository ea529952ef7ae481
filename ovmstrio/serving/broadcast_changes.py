"""Admin changes broadcast to all worker processes: either all workers make a change, or none does.

::

    change lock ──> this worker and the others, concurrently ──> done
                        └─ a failure ──> undone by all

All workers load at the same time, because a worker may need an object that another worker loads, such as an engine.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import structlog
import trio

from ovmstrio.core.errors import AlreadyExists, FailedPrecondition, ServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ovmstrio.core.worker_peers import WorkerPeers
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.model_control import ModelControl

log = structlog.get_logger(__name__)

_UNDO_TIMEOUT_SECONDS: Final = 60.0
_EXPECTED_TIMEOUT_SECONDS: Final = 5.0
"""Longest wait of a starting worker for the expected services of the others, which may be stopped."""

_T = TypeVar("_T")


class PeerRequest(StrEnum):
    """Messages between worker processes."""

    REGISTER = "register region"
    UNREGISTER = "unregister region"
    REGIONS = "regions"
    LOAD = "load"
    UNLOAD = "unload"
    UNDO = "undo"
    LOADED = "loaded"
    EXPECTED = "expected services"


PEER_REQUESTS: Final = frozenset(PeerRequest)
"""All messages of this module."""


class ServerModelControl(Protocol):
    """Loads and unloads services by name; see :class:`ovmstrio.serving.model_control.ModelControl`."""

    @property
    def names(self) -> list[str]:
        """All configured and uploaded names."""
        ...

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a service with its callees."""
        ...

    async def unload(self, name: str, *, with_callees: bool = False) -> None:
        """Unload a service."""
        ...


def server_model_control(plane: DataPlane) -> ServerModelControl:
    """Return the control that loads by name in all workers.

    Raises:
        FailedPrecondition: explicit model control is off.
    """
    if plane.control is None:
        raise FailedPrecondition(
            "loading and unloading by name is disabled: the server follows its configuration; "
            "start with --model-control explicit"
        )
    if plane.peers is None:
        return plane.control
    return _BroadcastModelControl(plane.control, plane.peers)


class _BroadcastModelControl:
    def __init__(self, control: ModelControl, peers: WorkerPeers) -> None:
        self._control = control
        self._peers = peers

    @property
    def names(self) -> list[str]:
        return self._control.names

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        here = partial(self._control.load, name, config, files)
        await self._peers.run_locked(partial(self._change, here, PeerRequest.LOAD, name, config, dict(files or {})))

    async def unload(self, name: str, *, with_callees: bool = False) -> None:
        here = partial(self._control.unload, name, with_callees=with_callees)
        await self._peers.run_locked(partial(self._change, here, PeerRequest.UNLOAD, name, with_callees))

    async def _change(self, here: Callable[..., Awaitable[None]], *method: Any) -> None:
        """Make a change in all workers, or undo it in all workers."""
        change = token_hex(8)
        others = partial(self._peers.call_all, *method, change, limit_seconds=float("inf"))
        try:
            await run_everywhere(partial(here, change=change), others)
        except BaseException:
            undo = partial(_undo_on_peers, self._peers, PeerRequest.UNDO, change)
            with trio.move_on_after(_UNDO_TIMEOUT_SECONDS, shield=True):
                await run_everywhere(partial(self._control.undo, change), undo)
            raise


async def run_everywhere(
    here: Callable[[], Awaitable[_T]], others: Callable[[], Awaitable[list[Any]]]
) -> tuple[_T, list[Any]]:
    """Run a change in this worker and in the others concurrently; return both results.

    Both have ended when this raises; an error of this worker takes precedence.
    """
    made: list[_T] = []
    answers: list[Any] = []
    errors: dict[bool, Exception] = {}

    async def ask_others() -> None:
        try:
            answers.extend(await others())
        except Exception as error:  # noqa: BLE001 - raised outside the nursery, to avoid an exception group
            errors[False] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_others)
        try:
            made.append(await here())
        except Exception as error:  # noqa: BLE001 - as above
            errors[True] = error
    for is_here in (True, False):
        if is_here in errors:
            raise errors[is_here]
    return made[0], answers


async def _undo_on_peers(peers: WorkerPeers, *method: Any) -> list[Any]:
    """Undo a change on all other workers; errors are logged."""
    try:
        return await peers.call_all(*method)
    except ServerError as error:
        log.error("change not undone on all workers", reason=error.message)  # noqa: TRY400 - expected
    return []


# Shared memory regions


async def register_region(plane: DataPlane, name: str, key: str, offset: int, byte_size: int) -> None:
    """Register a shared-memory region in all workers, or in none; raises as :meth:`ClientRegions.register`."""
    peers = plane.peers

    async def work() -> None:
        plane.regions.register(name, key, offset, byte_size)
        if peers is not None:
            try:
                await peers.call_all(PeerRequest.REGISTER, name, key, offset, byte_size)
            except BaseException:
                with trio.move_on_after(_UNDO_TIMEOUT_SECONDS, shield=True):
                    plane.regions.unregister(name)
                    await _undo_on_peers(peers, PeerRequest.UNREGISTER, name)
                raise

    await (work() if peers is None else peers.run_locked(work))


async def unregister_region(plane: DataPlane, name: str) -> None:
    """Unregister one region, or all, in all workers.

    Raises:
        NotReady: a worker does not answer.
    """
    peers = plane.peers
    plane.regions.unregister(name)
    if peers is not None:

        async def work() -> None:
            plane.regions.unregister(name)
            await peers.call_all(PeerRequest.UNREGISTER, name)

        await peers.run_locked(work)


async def sync_regions(plane: DataPlane) -> None:
    """Register the regions of the other workers in a starting worker."""
    if plane.peers is None or not plane.regions.is_allowed:
        return
    try:
        for regions in await plane.peers.call_all(PeerRequest.REGIONS):
            for region in regions:
                try:
                    _register(plane, *region)
                except ServerError as error:
                    log.warning("shared memory region not adopted", name=region[0], reason=error.message)
    except ServerError as error:
        log.error("could not fetch shared memory regions from peers", reason=error.message)  # noqa: TRY400 - expected


async def sync_loaded_models(plane: DataPlane) -> None:
    """Copy the explicit model loads of a peer to a starting worker."""
    if plane.peers is None or plane.control is None:
        return
    try:
        answers = await plane.peers.call_all(PeerRequest.LOADED)
    except ServerError as error:
        log.error("could not fetch loaded models from peers", reason=error.message)  # noqa: TRY400 - expected
        return
    for loads in answers:
        if loads is not None:
            plane.control.adopt(loads)
            return


async def sync_expected_services(plane: DataPlane) -> None:
    """Add the services that ready peers expect to the readiness of a starting worker."""
    if plane.peers is None:
        return
    calls = {row: [PeerRequest.EXPECTED] for row in plane.peers.others}
    answers = (await plane.peers.call_within(calls, _EXPECTED_TIMEOUT_SECONDS)).values()
    known = [names for names in answers if names is not None]
    if known:
        plane.registry.expect(name for names in known for name in names)


def _register(plane: DataPlane, name: str, key: str, offset: int, byte_size: int) -> None:
    """Register a region; an identical registered one is not an error."""
    try:
        plane.regions.register(name, key, offset, byte_size)
    except AlreadyExists:
        known = plane.regions.find(name)
        if (known.key, known.offset, known.byte_size) != (key, offset, byte_size):
            raise


async def handle_peer_change(plane: DataPlane, method: str, arguments: Sequence[Any]) -> Any:
    """Handle a message of another worker, which has checked the client's permission.

    Raises:
        ServerError: the change cannot be made.
    """
    match method:
        case PeerRequest.REGISTER:
            return _register(plane, *arguments)
        case PeerRequest.UNREGISTER:
            return plane.regions.unregister(*arguments)
        case PeerRequest.REGIONS:
            return [[each.name, each.key, each.offset, each.byte_size] for each in plane.regions.listed()]
        case PeerRequest.EXPECTED:
            return plane.registry.expected_services()
    if plane.control is None:
        raise FailedPrecondition("this worker has no model control")
    match method:
        case PeerRequest.LOAD:
            name, config, files, change = arguments
            return await plane.control.load(name, config, files, change=change)
        case PeerRequest.UNLOAD:
            name, with_callees, change = arguments
            return await plane.control.unload(name, with_callees=with_callees, change=change)
        case PeerRequest.LOADED:
            return await plane.control.loads()
    return await plane.control.undo(*arguments)
