"""Whether who asks is on this machine: what changes the server is not for everybody who can reach its ports."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

from ovmstrio.core.errors import PermissionDenied

__all__ = ["check_is_local"]


def check_is_local(client: str) -> None:
    """Let pass who is on this machine: at a loopback address, or at a Unix socket, where ``client`` is empty.

    What proxies say of their clients is not heard: anybody can say it.

    Raises:
        PermissionDenied: it is, or may be, another machine.
    """
    if client and not _is_loopback(client):
        raise PermissionDenied(
            f"what changes the server is done from its own machine, and this came from {client}; "
            "--allow_remote_admin lets other machines do it"
        )


def _is_loopback(client: str) -> bool:
    try:
        address = ip_address(client.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
