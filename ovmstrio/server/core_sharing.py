"""Which models have their threads bound to cores, chosen again as models come and go.

::

    registry: how many are configured ─┐
    models: who computes now ──────────┴─> CORES.is_shared ─> what is compiled from then on
                                                └─ has changed for some time ─┐
    models: their calls since the last look ─> CoreUser.wants_others ─────────┴─> CoreUser.choose_cores, one by one
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakSet

import structlog
import trio

from ovmstrio.observability.resident_memory import resident_bytes
from ovmstrio.server.memory_limit import memory_limit
from ovmstrio.work.cores import CORES

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.work.cores import CoreShare, CoreUser

__all__ = ["Sharing", "share_cores"]

log = structlog.get_logger(__name__)

Sharing = Literal["auto", "off"]

_LOOK_SECONDS: Final = 5.0
_SHARED_SECONDS: Final = 10.0
"""How long several have to be there before one that had the cores for itself is compiled again."""
_ALONE_SECONDS: Final = 120.0
"""How long one has to be alone before it has them for itself again: others may come back, and it loses little."""
_COPIES: Final = 2
"""As how many times its weights a model is taken to need beside what it has while it is compiled again."""


def _room() -> float:
    """Tell how many bytes of memory this process may have beside what it has."""
    return (memory_limit() or math.inf) - resident_bytes()


async def share_cores(
    sharing: Sharing,
    cores: CoreShare = CORES,
    *,
    room: Callable[[], float] = _room,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Have models choose their cores again when others have come or gone for good, or their calls want them shared out.

    This takes as long as the server lives.  One is compiled at a time, and for others that come or go each once for a
    change; one for which there is no ``room``, in bytes, stays as it is.  With ``off`` nothing is chosen, now or later.

    Cancellation: at once; the model that is being compiled stays as it is.
    """
    cores.chooses = sharing == "auto"
    task_status.started()
    is_shared, since = cores.is_shared, trio.current_time()
    asked: WeakSet[CoreUser] = WeakSet()
    cramped: WeakSet[CoreUser] = WeakSet()
    while cores.chooses:
        await trio.sleep(_LOOK_SECONDS)
        if cores.is_shared != is_shared:
            is_shared, since = cores.is_shared, trio.current_time()
            asked.clear()
        # Models that are retired meanwhile must neither stay in memory nor count as ones that compute.
        wanting = WeakSet([each for each in cores.users if each.wants_others()])
        wanting -= cramped
        while wanting:
            await _choose_cores(wanting.pop(), room, cramped)
        if trio.current_time() - since >= (_SHARED_SECONDS if is_shared else _ALONE_SECONDS):
            while (user := _next_user(cores, asked)) is not None and cores.is_shared is is_shared:
                asked.add(user)
                await _choose_cores(user, room, cramped)
            del user


async def _choose_cores(user: CoreUser, room: Callable[[], float], cramped: WeakSet[CoreUser]) -> None:
    if _COPIES * user.weight_bytes <= room():
        await user.choose_cores()
    else:
        cramped.add(user)
        log.info("a model keeps its cores: there is no memory for it twice", weights=user.weight_bytes)


def _next_user(cores: CoreShare, asked: WeakSet[CoreUser]) -> CoreUser | None:
    """Find somebody whose threads are bound and should not be, or the other way round, and who was not asked."""
    is_shared = cores.is_shared
    return next((each for each in cores.users if each.is_pinned is is_shared and each not in asked), None)
