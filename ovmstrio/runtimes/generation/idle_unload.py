"""Memory of models that nobody asks is given back: their process ends, and the next request starts another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog
import trio

if TYPE_CHECKING:
    from ovmstrio.config.text_models import TextModelSpec

__all__ = ["KnowsRequests", "sleep_when_idle"]

log = structlog.get_logger(__name__)


class KnowsRequests(Protocol):
    """Knows the requests of a model.

    Attributes:
        last_asked: when somebody has asked last, or an answer has ended, on trio's clock.
    """

    last_asked: float

    @property
    def open(self) -> int:
        """How many requests there are."""
        ...

    async def idle(self) -> None:
        """Wait until there is no request.

        Cancellation: at once.
        """
        ...


class Sleeper(Protocol):
    """A process that can give its memory back."""

    async def woken(self) -> None:
        """Wait until there is a process that can be asked.

        Cancellation: at once.
        """
        ...

    async def sleep(self) -> None:
        """End the process; the next one who asks has it started again.

        Cancellation: bounded.
        """
        ...

    def watched(self, requests: KnowsRequests) -> KnowsRequests:
        """Give what knows of all requests, where the argument knows of those of this process of the server."""
        ...


async def sleep_when_idle(process: Sleeper, asked: KnowsRequests, spec: TextModelSpec) -> None:
    """Give back the memory of a model that nobody has asked for a while.

    Cancellation: at once.
    """
    asked = process.watched(asked)
    while True:
        await process.woken()
        asked.last_asked = trio.current_time()
        await _asked_no_more(asked, spec.idle_unload_seconds)
        log.info("the model is unloaded, for nobody asks it", model=spec.name, seconds=spec.idle_unload_seconds)
        await process.sleep()


async def _asked_no_more(asked: KnowsRequests, seconds: float) -> None:
    """Wait until nobody has asked for so long.

    Cancellation: at once.
    """
    while asked.open or trio.current_time() < asked.last_asked + seconds:
        await asked.idle()
        await trio.sleep_until(asked.last_asked + seconds)
