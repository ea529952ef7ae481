"""What all programs here begin and end with: the server's socket, its lifeline, and a status for what was wrong."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any

from ovmstrio.core.line_streams import print_whole_lines
from ovmstrio.work.messages.blocking_channel import BlockingChannel, ChannelLost
from ovmstrio.work.messages.exits import LOST_CHANNEL, LOST_MODEL
from ovmstrio.work.messages.lifeline import watch_lifeline

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_process"]


def run_process(serve: Callable[[BlockingChannel, int, Any], None]) -> None:
    """Serve the server whose socket is the first argument, and end the process.

    Args:
        serve: gets the channel, and the number and the value of the first message.
    """
    end, lifeline = map(int, sys.argv[1:3])
    watch_lifeline(lifeline)
    for meant_for_the_server in (signal.SIGINT, signal.SIGTERM):
        signal.signal(meant_for_the_server, _leave_it_to_the_server)
    print_whole_lines()
    channel = BlockingChannel(socket.socket(fileno=end))
    status = 0
    try:
        first = channel.receive()
        if first is not None:
            serve(channel, *first.value)
    except ChannelLost:
        status = LOST_CHANNEL
    except Exception:  # noqa: BLE001 - the server learns of it by the status
        traceback.print_exc()
        status = LOST_MODEL
    sys.stdout.flush()
    sys.stderr.flush()
    # What the library would still do takes long, and gives nobody anything.
    os._exit(status)


def _leave_it_to_the_server(*_: object) -> None:
    """Do nothing; an ignored signal would be ignored by processes that libraries start, too."""
