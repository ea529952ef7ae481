"""Sockets by which the processes of one server speak with each other, and which nobody else may hold."""

from __future__ import annotations

import os
import socket
from typing import Final
from weakref import WeakSet

__all__ = ["noted"]

_ENDS: Final[WeakSet[socket.socket]] = WeakSet()


def noted(end: socket.socket) -> socket.socket:
    """Have what code of users forks hold no copy of a socket: it may outlive this process, and keep its address."""
    _ENDS.add(end)
    return end


def _disown() -> None:
    """Close them in a process that has been forked."""
    for end in list(_ENDS):
        if end.fileno() >= 0:
            os.close(end.detach())


os.register_at_fork(after_in_child=_disown)
