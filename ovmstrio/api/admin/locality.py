"""Whether who asks is on this machine: what changes the server is not for everybody who can reach its ports."""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address

from ovmstrio.core.errors import PermissionDenied

__all__ = ["check_is_local", "is_local"]


def check_is_local(client: str) -> None:
    """Let pass who is on this machine: at a loopback address, or at a Unix socket, where ``client`` is empty.

    What proxies say of their clients is not heard: anybody can say it.

    Raises:
        PermissionDenied: it is, or may be, another machine.
    """
    if not is_local(client):
        raise PermissionDenied(
            f"what changes the server is done from its own machine, and this came from {client}; "
            "--allow_remote_admin lets other machines do it"
        )


def is_local(client: str) -> bool:
    """Tell whether it is at a loopback address, or at a Unix socket, where ``client`` is empty."""
    if not client:
        return True
    try:
        address = ip_address(client.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
