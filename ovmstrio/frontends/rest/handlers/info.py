"""What a project tells of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import trio

from ovmstrio.frontends.rest.answers import JSON
from ovmstrio.frontends.rest.handlers.service import HandlerAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["info_answer"]


async def info_answer(info: Callable[[], Mapping[str, Any]]) -> HandlerAnswer:
    """Answer with what is told, which may need files; no thread of the handler's is needed for that.

    Cancellation: waits for the files.
    """
    told = await trio.to_thread.run_sync(info)
    return HandlerAnswer(200, (("content-type", JSON),), orjson.dumps(told))
