"""Listeners on ``host:port``, ``[v6]:port``, ``unix:/path`` and ``fd:3``, with or without TLS.

``kept:3`` is a socket that :func:`keep_open` has kept open across ``exec``.
"""

from __future__ import annotations

import errno
import os
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
from ovmstrio.transport.tls import ReloadableTls, TlsListener
from ovmstrio.util.regular_files import check_regular

# -- Socket listeners --------------------------------------------------------------------------------------------------

_MAX_EXTRA_ACCEPTS: Final = 7
"""Additional connections accepted per turn; setting up a connection costs more than a call."""

_CONNECTION_ERRORS: Final = frozenset(
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
"""Errors of a connection that failed before ``accept(2)``; the listener continues."""


class PlainListener(trio.abc.Listener[DirectStream]):
    """Socket listener that accepts several connections per turn of the event loop.

    trio's listener accepts one per turn, and turns of a busy server take milliseconds. It also drops the client's
    address, which is not available after a reset.

    Attributes:
        is_shared: whether the socket stays open elsewhere, and is accepted from there after this listener closes.
        is_inherited: whether the socket belongs to another process.
        file: the file of a Unix socket that this process has created.
    """

    def __init__(self, transport_listener: trio.SocketListener, *, is_inherited: bool = False) -> None:
        self.is_shared = self.is_inherited = is_inherited
        self._listener = transport_listener
        self.socket = transport_listener.socket
        sock = self.socket
        is_own_file = sock.family == socket.AF_UNIX and not is_inherited
        self.file = Path(sock.getsockname()) if is_own_file else None
        # A second object for the same descriptor, because trio's accept() is a checkpoint.
        self._sync_socket = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.fileno())
        self._accepted: deque[DirectStream] = deque()

    async def accept(self) -> DirectStream:
        """Accept one connection; raises ``OSError`` if the system lacks resources. Not always a checkpoint."""
        while not self._accepted:
            try:
                sock, name = await self.socket.accept()
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise trio.ClosedResourceError("the listener is closed") from None
                if error.errno not in _CONNECTION_ERRORS:
                    raise
            else:
                self._accepted.append(_stream(sock, name))
                self._accept_queued()
        return self._accepted.popleft()

    def _accept_queued(self) -> None:
        for _ in range(_MAX_EXTRA_ACCEPTS):
            try:
                sock, name = self._sync_socket.accept()
            except OSError:
                # The queue is empty, or the next trio accept() will raise the error.
                return
            self._accepted.append(_stream(trio.socket.from_stdlib_socket(sock), name))

    async def aclose(self) -> None:
        """Close the socket and accepted connections that were not returned."""
        self._sync_socket.detach()
        while self._accepted:
            self._accepted.popleft().socket.close()
        await self._listener.aclose()


def _stream(sock: trio.socket.SocketType, name: object) -> DirectStream:
    return DirectStream(trio.SocketStream(sock), socket_address(sock.family, name))


# -- Addresses ---------------------------------------------------------------------------------------------------------

Listener = trio.abc.Listener[Any]

_BACKLOG: Final = 1_024
_UNIX_PREFIX: Final = "unix:"
_DESCRIPTOR_PREFIX: Final = "fd:"
_KEPT_PREFIX: Final = "kept:"


def tls_context(certificate: Path, key: Path, client_ca: Path | None = None, *, protocol: str = "h2") -> ssl.SSLContext:
    """Create the server's TLS settings from PEM files; with ``client_ca``, clients need a certificate of that CA.

    Args:
        certificate: certificate chain.
        key: private key.
        client_ca: CA of client certificates.
        protocol: ALPN protocol.

    Raises:
        OSError: a file cannot be read; ``ssl.SSLError`` if it is malformed or the key does not match.
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
    addresses: Sequence[str], tls: ssl.SSLContext | ReloadableTls | None = None
) -> AsyncIterator[list[Listener]]:
    """Listen on all addresses until the block ends; a host name yields one listener per IP address.

    An inherited descriptor (``fd:3``) is taken over. Created Unix socket files are removed at the end, unless
    :func:`keep_open` keeps their sockets.

    Raises:
        ValueError: an address is malformed, or a descriptor is not a listening socket.
        OSError: an address is in use or not local.
    """
    opened: list[PlainListener] = []
    try:
        for address in addresses:
            if address.startswith(_UNIX_PREFIX):
                opened.append(PlainListener(await _listen_unix(Path(address.removeprefix(_UNIX_PREFIX)))))
            elif address.startswith((_DESCRIPTOR_PREFIX, _KEPT_PREFIX)):
                opened.append(_take_over(address))
            else:
                host, port = _split_host_port(address)
                opened.extend(map(PlainListener, await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)))
        yield [_with_tls(each, tls) for each in opened]
    finally:
        with trio.CancelScope(shield=True):
            for listener in opened:
                await listener.aclose()
        for listener in opened:
            if listener.file is not None and not listener.is_shared:
                listener.file.unlink(missing_ok=True)


def _with_tls(listener: PlainListener, tls: ssl.SSLContext | ReloadableTls | None) -> Listener:
    if isinstance(tls, ReloadableTls):
        return TlsListener(listener, tls)
    return listener if tls is None else trio.SSLListener(listener, tls, https_compatible=True)


def _take_over(address: str) -> PlainListener:
    number = address.rpartition(":")[2]
    try:
        sock = socket.socket(fileno=int(number))
    except (ValueError, OSError):
        raise ValueError(f"listen address: expected fd:NUMBER of an open socket, got {address!r}") from None
    listens = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listens:
        sock.close()
        raise ValueError(f"listen address: expected a stream socket that listens, got {address!r}")
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))
    return PlainListener(listener, is_inherited=address.startswith(_DESCRIPTOR_PREFIX))


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
    """Remove the socket file of a dead server; the file of a running server stays."""
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


def bound_address(listener: Listener) -> str:
    """Return the bound address of a listener, including the port chosen by the system."""
    sock = listener_socket(listener)
    return "unknown" if sock is None else _format(sock.getsockname())


def is_shared(listener: Listener) -> bool:
    """Return whether the listener's socket stays open elsewhere."""
    listener = _without_tls(listener)
    return isinstance(listener, PlainListener) and listener.is_shared


def keep_open(listener: Listener) -> str:
    """Keep the socket of a listener open after the listener closes, and return its address for this process."""
    listener = _without_tls(listener)
    if not isinstance(listener, PlainListener):
        raise TypeError(f"{type(listener).__name__} has no socket")
    listener.is_shared = True
    prefix = _DESCRIPTOR_PREFIX if listener.is_inherited else _KEPT_PREFIX
    return f"{prefix}{os.dup(listener.socket.fileno())}"


def _without_tls(listener: Listener) -> Listener:
    return listener.transport_listener if isinstance(listener, trio.SSLListener | TlsListener) else listener


def listener_socket(listener: Listener) -> trio.socket.SocketType | None:
    """Return the socket of a listener; None if it has none."""
    listener = _without_tls(listener)
    return listener.socket if isinstance(listener, trio.SocketListener | PlainListener) else None


def client_certificate(stream: trio.abc.Stream) -> Mapping[str, Any] | None:
    """Return the client's verified certificate; None without one, or before the handshake."""
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


# -- Front ends --------------------------------------------------------------------------------------------------------


class AddressFrontEnd(ABC):
    """Base of front ends that listen on addresses.

    Args:
        addresses: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: TLS settings; None for plain connections.
    """

    def __init__(self, addresses: Sequence[str], tls: ssl.SSLContext | None) -> None:
        self._addresses = addresses
        self._tls = tls

    async def serve(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until ``drain`` has ended the last connection; may be called once.

        Reports the bound addresses through ``task_status``. Errors of a connection or request do not affect others.

        Raises:
            ValueError: an address is malformed.
            OSError: an address cannot be bound.
        """
        async with open_listeners(self._addresses, self._tls) as listeners:
            await self.serve_listeners(listeners, task_status=task_status)

    @abstractmethod
    async def serve_listeners(
        self, listeners: list[Listener], *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on open listeners; like :meth:`serve`."""
