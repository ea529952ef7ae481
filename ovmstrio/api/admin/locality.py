"""The check that a client is on this machine; every grant by address goes through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.errors import PermissionDenied
from ovmstrio.core.peers import Loopback, UnixSocket, Unknown

if TYPE_CHECKING:
    from ovmstrio.core.peers import ClientAddress

__all__ = ["check_is_local", "is_local"]


def check_is_local(client: ClientAddress, rule: str, hint: str) -> None:
    """Raise unless the client is on this machine.

    Args:
        client: as :meth:`ovmstrio.core.peers.Peer.client` derives it.
        rule: what is allowed to local clients only, for the error.
        hint: how other clients are allowed, for the error.

    Raises:
        PermissionDenied: the client is on another machine, or its address is unknown.
    """
    if is_local(client):
        return
    if isinstance(client, Unknown):
        reason = f" ({client.reason})" if client.reason else ""
        raise PermissionDenied(f"{rule}, and the address of the client is unknown{reason}; {hint}")
    raise PermissionDenied(f"{rule}, and this request came from {client}; {hint}")


def is_local(client: ClientAddress) -> bool:
    """Return whether a client is at a loopback address or at a Unix socket of this machine."""
    return isinstance(client, Loopback | UnixSocket)
