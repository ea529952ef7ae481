"""Client addresses: loopback, Unix socket, remote or unknown, with the headers of trusted proxies.

The listener takes the address once, from ``accept``.  A :class:`Peer` is the other end of a connection;
:meth:`Peer.client` derives the client of one request, which differs from the peer where a proxy forwards requests.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

_FORWARDED_FOR: Final = "x-forwarded-for"
_FORWARDED: Final = "forwarded"
_FORWARDING: Final = frozenset(
    {
        _FORWARDED,
        "cdn-loop",
        "cf-connecting-ip",
        "client-ip",
        "fastly-client-ip",
        "fly-client-ip",
        "forwarded-for",
        "true-client-ip",
        "via",
        "x-azure-clientip",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-remote-addr",
        "x-remote-ip",
    }
)
_FORWARDING_PREFIXES: Final = ("x-forwarded", "x-original-", "x-envoy-", "x-real-")
"""Headers that proxies add.  Some proxies add the address of the client only if they are configured to."""
_MAX_PROXIES: Final = 32
"""Forwarded addresses that are read from the right; a longer chain has no known client."""
_MAX_PORT: Final = 65_535
_UNIX: Final = "unix"

_ENDPOINT: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([0-9.]+))(?::([0-9]{1,5}))?")
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
_ELEMENT: Final = re.compile(rf'(?:[^",]|{_QUOTED})*')
_PAIR: Final = re.compile(rf"[ \t]*([!#$%&'*+\-.^_`|~0-9A-Za-z]+)=({_QUOTED}|[^\s\",;=]*)[ \t]*")

IpAddress = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class _InternetAddress:
    """An address of IPv4 or IPv6.

    Attributes:
        host: as the system or the proxy writes it.
        port: 0 if it is not known.
    """

    host: str
    port: int = 0

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self.host


@dataclass(frozen=True, slots=True)
class Loopback(_InternetAddress):
    """A client at a loopback address of this machine."""


@dataclass(frozen=True, slots=True)
class Remote(_InternetAddress):
    """A client that may be on another machine; a forwarded address is always one, even ``127.0.0.1``."""


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A client at a Unix socket of this machine."""

    host: ClassVar[str] = ""
    port: ClassVar[int] = 0
    endpoint: ClassVar[str] = "unix:"

    def __str__(self) -> str:
        return _UNIX


@dataclass(frozen=True, slots=True)
class Unknown:
    """A client whose address is not known; nothing is granted to it.

    Attributes:
        reason: why, if more than a missing address is the cause.
        proxy: the peer that forwarded the request, whose address logs and user code see.
    """

    reason: str = ""
    proxy: Loopback | UnixSocket | Remote | None = None

    @property
    def host(self) -> str:
        """The host of the proxy, or ``unknown``."""
        return "unknown" if self.proxy is None else self.proxy.host

    @property
    def port(self) -> int:
        """The port of the proxy, or 0."""
        return 0 if self.proxy is None else self.proxy.port

    @property
    def endpoint(self) -> str:
        """The endpoint of the proxy, or ``unknown``."""
        return "unknown" if self.proxy is None else self.proxy.endpoint

    def __str__(self) -> str:
        return "unknown" if self.proxy is None else str(self.proxy)


ClientAddress = Loopback | UnixSocket | Remote | Unknown
"""``host`` is what user code sees, empty for a Unix socket; ``endpoint`` has the port; ``str`` is for logs."""

UNKNOWN: Final = Unknown()


def socket_address(family: int, name: object) -> ClientAddress:
    """Return the address of a socket's other end.

    Args:
        family: of the socket; it alone decides whether the socket is a Unix socket, whose peers have no name.
        name: what ``accept`` or ``getpeername`` returned.
    """
    if family == socket.AF_UNIX:
        return UnixSocket()
    if family not in {socket.AF_INET, socket.AF_INET6} or not isinstance(name, tuple):
        return UNKNOWN
    match name:
        case (str(host), int(port), *_) if (address := _parse_ip(host)) is not None:
            return Loopback(host, port) if address.is_loopback else Remote(host, port)
    return UNKNOWN


def _parse_ip(host: str) -> IpAddress | None:
    """Parse an address without its zone; an IPv4-mapped IPv6 address becomes IPv4."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


@dataclass(frozen=True, slots=True)
class TrustedProxies:
    """Proxies whose forwarding headers name the client.

    Attributes:
        networks: of their addresses.
        has_unix: whether every peer at a Unix socket is one.
    """

    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    has_unix: bool = False

    @classmethod
    def parse(cls, text: str) -> TrustedProxies:
        """Parse addresses and networks, separated by commas; ``unix`` stands for peers at Unix sockets.

        Raises:
            ValueError: an entry is none of these.
        """
        entries = [entry for entry in map(str.strip, text.split(",")) if entry]
        networks = tuple(_parse_network(entry) for entry in entries if entry != _UNIX)
        return cls(networks, _UNIX in entries)

    def trusts(self, peer: ClientAddress) -> bool:
        """Return whether the peer of a connection is a trusted proxy."""
        if isinstance(peer, Loopback | Remote):
            address = _parse_ip(peer.host) if self.networks else None
            return address is not None and self._contains(address)
        return isinstance(peer, UnixSocket) and self.has_unix

    def _contains(self, address: IpAddress) -> bool:
        return any(address in network for network in self.networks)

    def forwarded_client(
        self, proxy: Loopback | UnixSocket | Remote, headers: Iterable[tuple[str, str]]
    ) -> Remote | Unknown:
        """Return the client that a trusted proxy names: the right-most forwarded address that is no trusted proxy.

        A chain of trusted proxies alone has its first one as the client.  The client is ``Remote`` whatever the
        address is: it is the proxy's claim, and a client can put a loopback address into the header itself.  Without
        a header the client is unknown: a client can make some proxies drop the header.
        """
        pairs = [(name, value) for name, value in headers if name in {_FORWARDED_FOR, _FORWARDED}]
        listed = [value for name, value in pairs if name == _FORWARDED_FOR]
        described = [value for name, value in pairs if name == _FORWARDED]
        found = [self._first_untrusted(_listed(",".join(listed)), _FORWARDED_FOR)] if listed else []
        found += [self._first_untrusted(_described(",".join(described)), _FORWARDED)] if described else []
        if not found:
            return Unknown(f"a trusted proxy sent neither {_FORWARDED_FOR} nor {_FORWARDED}", proxy)
        if len({client.host for client in found}) > 1:
            return Unknown(f"{_FORWARDED_FOR} and {_FORWARDED} name different clients")
        return found[0]

    def _first_untrusted(self, endpoints: Iterator[Remote | None], header: str) -> Remote | Unknown:
        client: Remote | None = None
        for client in islice(endpoints, _MAX_PROXIES):
            address = None if client is None else _parse_ip(client.host)
            if client is None or address is None:
                return Unknown(f"{header} does not end with addresses")
            if not self._contains(address):
                return client
        if client is None or next(endpoints, client) is not client:
            return Unknown(f"{header} has no address or more than {_MAX_PROXIES}")
        return client


NO_PROXIES: Final = TrustedProxies()


def _parse_network(text: str) -> IPv4Network | IPv6Network:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ValueError(f"expected addresses, networks such as 10.0.0.0/8, or unix, got {text!r}: {error}") from None
    mapped = network.network_address.ipv4_mapped if isinstance(network, IPv6Network) else None
    return network if mapped is None else IPv4Network((mapped, max(network.prefixlen - 96, 0)))


def _listed(value: str) -> Iterator[Remote | None]:
    """Yield the elements of ``X-Forwarded-For`` from the right; None for one that is no address."""
    return map(_parse_endpoint, reversed(value.split(",")))


def _described(value: str) -> Iterator[Remote | None]:
    """Yield ``for`` of the elements of ``Forwarded`` (RFC 7239) from the right; None for one that is no address."""
    elements, position = [], 0
    while position <= len(value):
        match = _ELEMENT.match(value, position)
        end = position if match is None else match.end()
        if value[end : end + 1] not in {"", ","}:
            # Unterminated quote: the elements cannot be separated.
            return iter((None,))
        elements.append(value[position:end])
        position = end + 1
    return map(_described_endpoint, reversed(elements))


def _described_endpoint(element: str) -> Remote | None:
    found: str | None = None
    position = 0
    while (match := _PAIR.match(element, position)) is not None:
        if match[1].lower() == "for":
            if found is not None:
                return None
            found = re.sub(r"\\(.)", r"\1", match[2][1:-1]) if match[2].startswith('"') else match[2]
        position = match.end()
        if element[position : position + 1] != ";":
            break
        position += 1
    return None if found is None or position < len(element) else _parse_endpoint(found)


def _parse_endpoint(text: str) -> Remote | None:
    text = text.strip(" \t")
    match = _ENDPOINT.fullmatch(text)
    host, port = (text, "0") if match is None else (match[1] or match[2], match[3] or "0")
    address = _parse_ip(host)
    # The address is formatted from its number: a zone could contain any characters, and the host is logged.
    return None if address is None or int(port) > _MAX_PORT else Remote(str(address), int(port))


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection, and how the server treats it.

    Attributes:
        address: as ``accept`` reported it.
        certificate: the verified client certificate as ``ssl.SSLSocket.getpeercert`` returns it; None without one.
        trusted_proxies: whose forwarding headers name clients.
        is_encrypted: whether the connection uses TLS.
        revocable_streams: the server's open streams of authenticated callers; None without authentication.
    """

    address: ClientAddress = UNKNOWN
    certificate: Mapping[str, Any] | None = None
    trusted_proxies: TrustedProxies = NO_PROXIES
    is_encrypted: bool = False
    revocable_streams: set[Any] | None = field(default=None, compare=False, repr=False)

    def client(self, headers: Iterable[tuple[str, str]]) -> ClientAddress:
        """Return the client of a request on this connection.

        A local peer that sends a header of proxies is a proxy, and its client is unknown unless the proxy is trusted.
        Of any other peer that is not trusted, the headers do not matter.

        Args:
            headers: names in lower case and values, or the metadata of gRPC.
        """
        address = self.address
        if isinstance(address, Unknown):
            return address
        if self.trusted_proxies.trusts(address):
            return self.trusted_proxies.forwarded_client(address, headers)
        if isinstance(address, Remote):
            return address
        header = _forwarding_header(headers)
        if not header:
            return address
        return Unknown(f"header {header} shows a proxy that --trusted-proxies does not name", address)


UNKNOWN_PEER: Final = Peer()


def _forwarding_header(headers: Iterable[tuple[str, str]]) -> str:
    for name, _ in headers:
        if name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES):
            return name
    return ""
