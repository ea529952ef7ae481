"""Threads for the calls of one node, which cannot be stopped and are left to end by themselves.

They are the only threads of custom nodes that may outlive the task that started them.
"""

from __future__ import annotations

from typing import Final

import structlog

from ovmstrio.core.errors import Overloaded
from ovmstrio.work.threads.worker_threads import WorkerThreads

__all__ = ["CALLS_AT_ONCE", "node_threads"]

log = structlog.get_logger(__name__)

CALLS_AT_ONCE: Final = 64
"""How many calls of one node may be in threads; others wait."""


def node_threads(name: str, described: str, calls_at_once: int = CALLS_AT_ONCE) -> WorkerThreads:
    """Give a pool that refuses calls when all its threads are busy with calls whose callers have left.

    Args:
        name: the node's.
        described: the same for messages.
        calls_at_once: how many threads there may be.
    """

    def refusal(abandoned: int) -> Overloaded | None:
        if abandoned < calls_at_once:
            return None
        return Overloaded(f"all {abandoned} threads of {described} are busy with calls whose callers have left")

    def told_of_leaving(abandoned: int) -> None:
        log.info("custom node goes on although its caller has left", node=described, abandoned=abandoned)

    return WorkerThreads(
        calls_at_once, 0, is_strict=True, refusal=refusal, told_of_leaving=told_of_leaving, names={"node": name}
    )
