"""Which models have their threads bound to cores, chosen again as models come and go.

::

    registry: how many are configured ─┐
    models: who computes now ──────────┴─> CORES.is_shared ─> what is compiled from then on
                                                └─ has changed for some time ─> CoreUser.choose_cores, one by one
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakSet

import trio

from ovmstrio.work.cores import CORES

if TYPE_CHECKING:
    from ovmstrio.work.cores import CoreShare, CoreUser

__all__ = ["Sharing", "share_cores"]

Sharing = Literal["auto", "off"]

_LOOK_SECONDS: Final = 5.0
_SHARED_SECONDS: Final = 10.0
"""How long several have to be there before one that had the cores for itself is compiled again."""
_ALONE_SECONDS: Final = 120.0
"""How long one has to be alone before it has them for itself again: others may come back, and it loses little."""


async def share_cores(
    sharing: Sharing, cores: CoreShare = CORES, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Have models choose their cores again when others have come or gone for good, for as long as the server lives.

    One is compiled at a time, and each once for a change.  With ``off`` nothing is chosen, now or later.

    Cancellation: at once; the model that is being compiled stays as it is.
    """
    cores.chooses = sharing == "auto"
    task_status.started()
    is_shared, since = cores.is_shared, trio.current_time()
    asked: WeakSet[CoreUser] = WeakSet()
    while cores.chooses:
        await trio.sleep(_LOOK_SECONDS)
        if cores.is_shared != is_shared:
            is_shared, since = cores.is_shared, trio.current_time()
            asked.clear()
        if trio.current_time() - since < (_SHARED_SECONDS if is_shared else _ALONE_SECONDS):
            continue
        for user in [each for each in cores.users if each.is_pinned is is_shared and each not in asked]:
            if cores.is_shared is not is_shared:
                break
            asked.add(user)
            await user.choose_cores()
