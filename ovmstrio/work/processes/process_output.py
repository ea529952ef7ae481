"""What a worker process prints, by whatever means, as lines of the server's log."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import trio

from ovmstrio.core.line_streams import StreamName, whole_lines
from ovmstrio.work.user_code.printing import log_printed

__all__ = ["output_logged"]

_AT_ONCE: Final = 4096
_LINES_AT_ONCE: Final = 32
_REST_SECONDS: Final = 0.5
"""How long what a process has printed before its end is waited for; what it has started may keep its pipes open."""


@asynccontextmanager
async def output_logged(process: trio.Process, names: Mapping[str, str]) -> AsyncIterator[None]:
    """Log what a process prints while the block runs, and what is left in its pipes then.

    A process that prints faster than its lines are logged waits.

    Raises:
        ExceptionGroup: of what the block raises.

    Ownership: the process's ends of both pipes.

    Cancellation: at once.
    """
    pipes: tuple[tuple[StreamName, trio.abc.ReceiveStream | None], ...] = (
        ("stdout", process.stdout),
        ("stderr", process.stderr),
    )
    async with trio.open_nursery() as nursery:
        for name, pipe in pipes:
            if pipe is not None:
                nursery.start_soon(_log_lines, pipe, name, names)
        yield
        nursery.cancel_scope.deadline = trio.current_time() + _REST_SECONDS


async def _log_lines(pipe: trio.abc.ReceiveStream, name: StreamName, names: Mapping[str, str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = ""
    async with pipe:
        try:
            while data := await pipe.receive_some(_AT_ONCE):
                lines, begun = whole_lines(begun, decoder.decode(data))
                for number, line in enumerate(lines, 1):
                    log_printed(line, name, names)
                    if not number % _LINES_AT_ONCE:
                        await trio.lowlevel.checkpoint()
        finally:
            for line in whole_lines(begun, "\n")[0]:
                log_printed(line, name, names)
