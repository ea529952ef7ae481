"""What a project tells of its models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import trio

from ovmstrio.api.handlers.http.service import HandlerAnswer
from ovmstrio.wire.http.answers import JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["info_answer"]


async def info_answer(info: Callable[[], Mapping[str, Any]]) -> HandlerAnswer:
    """Answer with what is told, which may need files; no thread of the handler's is needed for that.

    Cancellation: waits for the files.
    """
    told = await trio.to_thread.run_sync(info)
    return HandlerAnswer(200, (("content-type", JSON),), orjson.dumps(told))
