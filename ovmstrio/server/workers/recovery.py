"""What becomes of a connection whose process has died: answered by another process, or told the truth."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.server.workers.journal import State
from ovmstrio.wire.closing import LINGER_SECONDS
from ovmstrio.wire.http.answers import json_answer
from ovmstrio.wire.http.prefixed_stream import send_answer

if TYPE_CHECKING:
    from ovmstrio.server.workers.connections import GivenConnection
    from ovmstrio.server.workers.journal import Standing

__all__ = ["go_on_with"]

_TRIES: Final = 2
"""So many processes may end over one request that no code of users has begun for."""
_SEND_SECONDS: Final = 5.0

log = structlog.get_logger(__name__)


async def go_on_with(connection: GivenConnection, standing: Standing, cause: str) -> bool:
    """See to a connection of a process that has ended; True if another one is to go on with it.

    The call whose code ran gets an error, at once; what had been read behind it, or before any code ran, is left for
    the other process.  An answer that had begun breaks off.

    Args:
        connection: says then what the other process is to be given.
        standing: how it stood.
        cause: how the process ended.

    Ownership: the caller closes the connection.

    Cancellation: at once.
    """
    kept, request = standing.kept, standing.request
    if standing.answered != connection.answered:
        connection.tries = 0  # They were over requests that have been answered since.
    if standing.state is State.GIVEN and kept is not None:
        return True
    if standing.state is State.WAITING:
        if kept is not None and connection.tries < _TRIES:
            connection.answered, connection.kept = standing.answered, kept
            connection.tries += bool(kept)
            return True
        text = f"the process that had read this request ended by {cause}, before it was answered: send it again"
        await _answer(connection, 503, text, goes_on=False)
    elif standing.state is State.BEGUN:
        goes_on = kept is not None and request is not None
        await _answer(connection, 500, f"the process that ran this call ended by {cause}", goes_on=goes_on)
        if kept is not None and request is not None:
            connection.answered, connection.kept = standing.answered + request, kept[request:]
            connection.tries = 0
            return True
    return False


async def _answer(connection: GivenConnection, status: int, text: str, *, goes_on: bool) -> None:
    """Answer for a process, and unless the connection goes on say that nothing more comes."""
    stream = connection.stream
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(_SEND_SECONDS):
        await send_answer(stream, json_answer({"error": text}, status), keep_alive=goes_on)
        if not goes_on:
            await stream.send_eof()
            # Closing with bytes unread would break the connection before the client has seen the answer.
            with trio.move_on_after(LINGER_SECONDS):
                while await stream.receive_some():
                    pass
