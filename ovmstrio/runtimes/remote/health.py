"""Whether the addresses of a model answer, asked again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.core.reconsidering import readiness_may_have_changed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.runtimes.remote.targets import Target

__all__ = ["watch"]

log = structlog.get_logger(__name__)

_ASK_SECONDS: Final = 5.0
"""How long the answer may take."""
_SILENT: Final = 2
"""So many questions without an answer, one after the other, and the connection is not believed in any more."""


async def watch(target: Target, name: str, every_seconds: float, returned: Callable[[Target], Awaitable[str]]) -> None:
    """Keep a target's ailment up to date, until cancelled.

    Args:
        target: which address.
        name: of the model, for the log.
        every_seconds: how often it is asked; at once when a call has found it unwell.
        returned: looks at one that is well again; gives what is wrong with it all the same, or nothing.

    Cancellation: at any checkpoint.
    """
    silent = 0
    while True:
        with trio.move_on_after(every_seconds):
            await target.suspect.wait()
            # What was found a moment ago would be found again.
            await trio.sleep(min(every_seconds, 1.0))
        target.suspect = trio.Event()
        before = target.ailment
        with trio.move_on_after(_ASK_SECONDS) as asking:
            target.ailment = await _ask(target, returned if before else None)
        silent = silent + 1 if asking.cancelled_caught else 0
        if asking.cancelled_caught:
            target.ailment = f"no answer within {_ASK_SECONDS:g} s"
        if silent >= _SILENT:
            target.endpoint.doubt()
        # Calls may have opened or closed its circuit since, too.
        readiness_may_have_changed()
        if bool(before) != bool(target.ailment):
            _tell(target, name)


async def _ask(target: Target, returned: Callable[[Target], Awaitable[str]] | None) -> str:
    try:
        ailment = await target.endpoint.ask_ready()
        return ailment or ("" if returned is None else await returned(target))
    except ServerError as error:
        return error.message


def _tell(target: Target, name: str) -> None:
    if target.ailment:
        log.warning("a remote model does not answer", name=name, at=target.endpoint.address, reason=target.ailment)
    else:
        log.info("a remote model answers again", name=name, at=target.endpoint.address)
