"""Changes that clients make to a server as a whole: where several processes are one server, all make them or none does.

::

    a turn ──> here, and the others, side by side ──> done
                 └─ or ──> taken back by all

None is first, for one process may have to wait for what another one loads, as the engines of models of text.
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

    from ovmstrio.core.worker_peers import Siblings
    from ovmstrio.serving.data_plane import DataPlane
    from ovmstrio.serving.model_control import ModelControl

__all__ = [
    "CHANGES",
    "LoadsByName",
    "adopt_loads",
    "adopt_regions",
    "control_of_all",
    "make_change",
    "make_side_by_side",
    "register_region",
    "unregister_region",
]

log = structlog.get_logger(__name__)

_UNDO_SECONDS: Final = 60.0

_T = TypeVar("_T")


class Question(StrEnum):
    """What processes ask each other."""

    REGISTER = "register region"
    UNREGISTER = "unregister region"
    REGIONS = "regions"
    LOAD = "load"
    UNLOAD = "unload"
    UNDO = "take back"
    LOADED = "loaded"


CHANGES: Final = frozenset(Question)
"""All of it."""


class LoadsByName(Protocol):
    """Loads and unloads services by name; see :class:`ovmstrio.serving.model_control.ModelControl`."""

    @property
    def names(self) -> list[str]:
        """All that could be loaded, and what was loaded from files."""
        ...

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a service, and what it calls.

        Raises:
            ModelFailure: it cannot be loaded; what was served under the name goes on.
        """
        ...

    async def unload(self, name: str, *, with_callees: bool = False) -> None:
        """Stop serving a name.

        Raises:
            NotFound: nothing of that name could be loaded.
        """
        ...


def control_of_all(plane: DataPlane) -> LoadsByName | None:
    """Give what loads by name in all processes; None where nothing does."""
    if plane.control is None or plane.siblings is None:
        return plane.control
    return _ControlOfAll(plane.control, plane.siblings)


class _ControlOfAll:
    """Loads by name in all processes."""

    def __init__(self, control: ModelControl, siblings: Siblings) -> None:
        self._control = control
        self._siblings = siblings

    @property
    def names(self) -> list[str]:
        return self._control.names

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        here = partial(self._control.load, name, config, files)
        await self._siblings.in_turn(partial(self._change, here, Question.LOAD, name, config, dict(files or {})))

    async def unload(self, name: str, *, with_callees: bool = False) -> None:
        here = partial(self._control.unload, name, with_callees=with_callees)
        await self._siblings.in_turn(partial(self._change, here, Question.UNLOAD, name, with_callees))

    async def _change(self, here: Callable[..., Awaitable[None]], *question: Any) -> None:
        """Make a change here, and have the others make it.

        Raises:
            ServerError: one of them could not; all have what they had before.
        """
        change = token_hex(8)
        others = partial(self._siblings.ask_all, *question, change, limit_seconds=float("inf"))
        try:
            await make_side_by_side(partial(here, change=change), others)
        except BaseException:
            undo = partial(_take_back, self._siblings, Question.UNDO, change)
            with trio.move_on_after(_UNDO_SECONDS, shield=True):
                await make_side_by_side(partial(self._control.undo, change), undo)
            raise


async def make_side_by_side(
    here: Callable[[], Awaitable[_T]], others: Callable[[], Awaitable[list[Any]]]
) -> tuple[_T, list[Any]]:
    """Make a change in this process and in the others at the same time; gives what both have said.

    Raises:
        Exception: what was raised here, or else by the others; both have ended then.

    Cancellation: as both.
    """
    made: list[_T] = []
    told: list[Any] = []
    errors: dict[bool, Exception] = {}

    async def have_others() -> None:
        try:
            told.extend(await others())
        except Exception as error:  # noqa: BLE001 - raised below, outside of the nursery, which would make a group of it
            errors[False] = error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(have_others)
        try:
            made.append(await here())
        except Exception as error:  # noqa: BLE001 - likewise
            errors[True] = error
    for is_here in (True, False):
        if is_here in errors:
            raise errors[is_here]
    return made[0], told


async def _take_back(siblings: Siblings, *question: Any) -> list[Any]:
    """Have all others take a change back; what goes wrong with that is logged."""
    try:
        return await siblings.ask_all(*question)
    except ServerError as error:
        log.error("a change could not be taken back by all", reason=error.message)  # noqa: TRY400 - told, not unforeseen
    return []


# Regions of shared memory


async def register_region(plane: DataPlane, name: str, key: str, offset: int, byte_size: int) -> None:
    """Make a region known to all processes.

    Raises:
        ServerError: as :meth:`ClientRegions.register`; no process has it.

    Cancellation: no process has it then.
    """
    siblings = plane.siblings

    async def work() -> None:
        plane.regions.register(name, key, offset, byte_size)
        if siblings is not None:
            try:
                await siblings.ask_all(Question.REGISTER, name, key, offset, byte_size)
            except BaseException:
                with trio.move_on_after(_UNDO_SECONDS, shield=True):
                    plane.regions.unregister(name)
                    await _take_back(siblings, Question.UNREGISTER, name)
                raise

    await (work() if siblings is None else siblings.in_turn(work))


async def unregister_region(plane: DataPlane, name: str) -> None:
    """Have all processes forget one region, or all.

    Raises:
        NotReady: a process does not answer.
    """
    siblings = plane.siblings
    plane.regions.unregister(name)
    if siblings is not None:

        async def work() -> None:
            plane.regions.unregister(name)
            await siblings.ask_all(Question.UNREGISTER, name)

        await siblings.in_turn(work)


async def adopt_regions(plane: DataPlane) -> None:
    """Know the regions that the others know, for a process that begins.

    Cancellation: at once.
    """
    if plane.siblings is None or not plane.regions.is_allowed:
        return
    try:
        for regions in await plane.siblings.ask_all(Question.REGIONS):
            for region in regions:
                try:
                    _register(plane, *region)
                except ServerError as error:
                    log.warning("a region of shared memory is gone", name=region[0], reason=error.message)
    except ServerError as error:
        log.error("regions of shared memory are not known", reason=error.message)  # noqa: TRY400 - told, not unforeseen


async def adopt_loads(plane: DataPlane) -> None:
    """Load first what the others have loaded by name, for a process that begins; one of them tells.

    Cancellation: at once.
    """
    if plane.siblings is None or plane.control is None:
        return
    try:
        told = await plane.siblings.ask_all(Question.LOADED)
    except ServerError as error:
        log.error("it is not known what is loaded", reason=error.message)  # noqa: TRY400 - told, not unforeseen
        return
    for loads in told:
        if loads is not None:
            plane.control.adopt(loads)
            return


def _register(plane: DataPlane, name: str, key: str, offset: int, byte_size: int) -> None:
    """Make a region known, which may be so already.

    Raises:
        ServerError: as :meth:`ClientRegions.register`.
    """
    try:
        plane.regions.register(name, key, offset, byte_size)
    except AlreadyExists:
        known = plane.regions.find(name)
        if (known.key, known.offset, known.byte_size) != (key, offset, byte_size):
            raise


async def make_change(plane: DataPlane, question: str, arguments: Sequence[Any]) -> Any:
    """Make a change that another process makes, whose client may.

    Raises:
        ServerError: it cannot be made.
    """
    match question:
        case Question.REGISTER:
            return _register(plane, *arguments)
        case Question.UNREGISTER:
            return plane.regions.unregister(*arguments)
        case Question.REGIONS:
            return [[each.name, each.key, each.offset, each.byte_size] for each in plane.regions.listed()]
    if plane.control is None:
        raise FailedPrecondition("this process does not load by name")
    match question:
        case Question.LOAD:
            name, config, files, change = arguments
            return await plane.control.load(name, config, files, change=change)
        case Question.UNLOAD:
            name, with_callees, change = arguments
            return await plane.control.unload(name, with_callees=with_callees, change=change)
        case Question.LOADED:
            return await plane.control.loads()
    return await plane.control.undo(*arguments)
