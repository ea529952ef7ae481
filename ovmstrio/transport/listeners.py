"""Addresses to listen on: ``host:port``, ``[v6]:port``, ``unix:/path`` and ``fd:3``, with TLS or without."""

from __future__ import annotations

import errno
import socket
import ssl
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import trio

from ovmstrio.core.connection import socket_address
from ovmstrio.transport.direct_stream import DirectStream
from ovmstrio.transport.tls import ReloadedTls, TlsListener
from ovmstrio.util.regular_files import check_regular

__all__ = [
    "AtAddresses",
    "InheritedListener",
    "Listener",
    "PlainListener",
    "address_of",
    "certificate_of",
    "is_inherited",
    "open_listeners",
    "socket_of",
    "tls_context",
]

# ----------------------------------------------------------------------
# Listeners at sockets, which take several connections in a turn of the event loop
# ----------------------------------------------------------------------

_MORE_AT_ONCE: Final = 7
"""To begin with a connection takes longer than a call: no more of them than others can wait for."""

_FAILED_CONNECTION: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EPROTO,
        errno.ETIMEDOUT,
    }
)
"""Errors of a connection that fails before it is accepted (``accept(2)``); the listener goes on."""


class PlainListener(trio.abc.Listener[DirectStream]):
    """Accepts connections at a socket, a few of those that wait in each turn of the event loop.

    trio's takes one, and turns of a busy server take milliseconds: of many clients that come together the last would
    wait for as many of them.  It also drops the address of the client, which a connection that is reset has no more.

    Args:
        transport_listener: trio's; closed with this one.

    Attributes:
        socket: trio's.
    """

    def __init__(self, transport_listener: trio.SocketListener) -> None:
        self._listener = transport_listener
        self.socket = transport_listener.socket
        own = self.socket
        # Another object for the same descriptor, as trio's gives the turn away with each connection.
        self._same = socket.socket(own.family, own.type, own.proto, fileno=own.fileno())
        self._taken: deque[DirectStream] = deque()

    async def accept(self) -> DirectStream:
        """Accept one connection, which keeps the address of its client.

        Raises:
            OSError: the system has no room for another one, or the socket is broken.
            trio.ClosedResourceError: this is closed.

        Cancellation: at once.  Not a checkpoint where a connection was taken together with the last one.
        """
        while not self._taken:
            try:
                sock, name = await self.socket.accept()
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise trio.ClosedResourceError("the listener is closed") from None
                if error.errno not in _FAILED_CONNECTION:
                    raise
            else:
                self._taken.append(_stream(sock, name))
                self._take_more()
        return self._taken.popleft()

    def _take_more(self) -> None:
        for _ in range(_MORE_AT_ONCE):
            try:
                sock, name = self._same.accept()
            except OSError:
                # None waits; or it is told of what is wrong when one is waited for.
                return
            self._taken.append(_stream(trio.socket.from_stdlib_socket(sock), name))

    async def aclose(self) -> None:
        """Close the socket, and the connections that nobody has asked for."""
        self._same.detach()
        while self._taken:
            self._taken.popleft().socket.close()
        await self._listener.aclose()


def _stream(sock: trio.socket.SocketType, name: object) -> DirectStream:
    return DirectStream(trio.SocketStream(sock), socket_address(sock.family, name))


class InheritedListener(PlainListener):
    """A listener at a socket that others have, too: it goes on to take connections when this process does not."""


# ----------------------------------------------------------------------
# Addresses to listen on: ``host:port``, ``[v6]:port``, ``unix:/path`` and ``fd:3``, with TLS or without
# ----------------------------------------------------------------------

Listener = trio.abc.Listener[Any]

_BACKLOG: Final = 1_024
_UNIX_PREFIX: Final = "unix:"
_DESCRIPTOR_PREFIX: Final = "fd:"


def tls_context(certificate: Path, key: Path, client_ca: Path | None = None, *, protocol: str = "h2") -> ssl.SSLContext:
    """Make the server's TLS settings from PEM files; with ``client_ca`` clients must show a certificate of that CA.

    ``protocol`` is what ALPN offers.

    Raises:
        OSError: a file cannot be read.
        ssl.SSLError: a file does not hold what it should, or the key is not the certificate's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (certificate, key, client_ca):
        if path is not None:
            check_regular(path)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols([protocol])
    if client_ca is not None:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@asynccontextmanager
async def open_listeners(
    addresses: Sequence[str], tls: ssl.SSLContext | ReloadedTls | None = None
) -> AsyncIterator[list[Listener]]:
    """Listen on every address; a host name gives one listener for each of its addresses.

    An inherited descriptor (``fd:3``) is taken over; what else has the socket keeps it, and its file.

    Ownership: the listeners are closed and Unix sockets removed when the block ends.

    Raises:
        ValueError: an address is not understood, or a descriptor is no socket that listens.
        OSError: an address is in use or not this machine's.
    """
    opened: list[PlainListener] = []
    paths: list[Path] = []
    try:
        for address in addresses:
            if address.startswith(_UNIX_PREFIX):
                path = Path(address.removeprefix(_UNIX_PREFIX))
                opened.append(PlainListener(await _listen_unix(path)))
                paths.append(path)
            elif address.startswith(_DESCRIPTOR_PREFIX):
                opened.append(_take_over(address))
            else:
                host, port = _split_host_port(address)
                opened.extend(map(PlainListener, await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)))
        yield [_with_tls(each, tls) for each in opened]
    finally:
        with trio.CancelScope(shield=True):
            for listener in opened:
                await listener.aclose()
        for path in paths:
            path.unlink(missing_ok=True)


def _with_tls(listener: PlainListener, tls: ssl.SSLContext | ReloadedTls | None) -> Listener:
    if isinstance(tls, ReloadedTls):
        return TlsListener(listener, tls)
    return listener if tls is None else trio.SSLListener(listener, tls, https_compatible=True)


def _take_over(address: str) -> InheritedListener:
    number = address.removeprefix(_DESCRIPTOR_PREFIX)
    try:
        sock = socket.socket(fileno=int(number))
    except (ValueError, OSError):
        raise ValueError(f"listen address: expected fd:NUMBER of an open socket, got {address!r}") from None
    listens = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens:
        sock.close()
        raise ValueError(f"listen address: expected a stream socket that listens, got {address!r}")
    return InheritedListener(trio.SocketListener(trio.socket.from_stdlib_socket(sock)))


def _split_host_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"listen address: expected host:port, [host]:port, unix:/path or fd:NUMBER, got {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _listen_unix(path: Path) -> trio.SocketListener:
    await _remove_stale(path)
    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    try:
        await sock.bind(str(path))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


async def _remove_stale(path: Path) -> None:
    """Remove a socket file that a dead server left; a live one's stays, and binding then fails."""
    try:
        status = await trio.Path(path).stat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise OSError(errno.EADDRINUSE, f"{path} exists and is not a socket")
    try:
        stream = await trio.open_unix_socket(path)
    except ConnectionRefusedError:
        await trio.Path(path).unlink(missing_ok=True)
    else:
        await stream.aclose()
        raise OSError(errno.EADDRINUSE, f"another server listens on {path}")


def address_of(listener: Listener) -> str:
    """Say where a listener listens, with the port that the system chose."""
    sock = socket_of(listener)
    return "unknown" if sock is None else _format(sock.getsockname())


def is_inherited(listener: Listener) -> bool:
    """Tell whether others have the socket of a listener, too, so that it must be left as it is."""
    return isinstance(_without_tls(listener), InheritedListener)


def _without_tls(listener: Listener) -> Listener:
    return listener.transport_listener if isinstance(listener, trio.SSLListener | TlsListener) else listener


def socket_of(listener: Listener) -> trio.socket.SocketType | None:
    """Give the socket of a listener; None for one that has its connections from elsewhere."""
    listener = _without_tls(listener)
    return listener.socket if isinstance(listener, trio.SocketListener | PlainListener) else None


def certificate_of(stream: trio.abc.Stream) -> Mapping[str, Any] | None:
    """Return the verified certificate of the client; None without one, or before the handshake."""
    if isinstance(stream, trio.SSLStream):
        with suppress(trio.NeedHandshakeError):
            certificate: Mapping[str, Any] | None = stream.getpeercert()
            return certificate
    return None


def _format(name: object) -> str:
    if not isinstance(name, tuple):
        return f"{_UNIX_PREFIX}{name or ''}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ----------------------------------------------------------------------
# What front ends have in common that open listeners of their own, and serve those that are given to them
# ----------------------------------------------------------------------


class AtAddresses(ABC):
    """Serves at addresses.

    Args:
        addresses: where to listen: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: the server's TLS settings, None for plain connections.
    """

    def __init__(self, addresses: Sequence[str], tls: ssl.SSLContext | None) -> None:
        self._addresses = addresses
        self._tls = tls

    async def serve(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until a drain has ended the last connection; may be run once.

        Reports the addresses that are bound once connections are accepted.

        Ownership: listeners, connections and requests.  A failing connection or request ends nothing but itself.

        Raises:
            ValueError: an address is not understood.
            OSError: an address cannot be bound.

        Cancellation: closes everything at once.
        """
        async with open_listeners(self._addresses, self._tls) as listeners:
            await self.serve_listeners(listeners, task_status=task_status)

    @abstractmethod
    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Do as :meth:`serve` with listeners that are the caller's."""
