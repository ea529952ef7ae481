"""Memory of models that nobody asks is given back: their process ends, and the next request starts another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog
import trio

if TYPE_CHECKING:
    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.runtimes.generation.engine_process import EngineProcess

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


async def sleep_when_idle(process: EngineProcess, asked: KnowsRequests, spec: TextModelSpec) -> None:
    """Give back the memory of a model that nobody has asked for a while.

    Cancellation: at once.
    """
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
