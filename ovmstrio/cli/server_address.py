"""Address of a server in ``--url``: a scheme names the protocol, or a probe of the port finds it out.

A command that requires one protocol and gets the port of the other asks the server for its ports.
"""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ovmstrio.client import ClientTls, Unreachable, open_client
from ovmstrio.core.errors import InvalidRequest, ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Protocol", "ServerAddress", "TlsFiles", "find_server", "unreachable_hint"]

_HOST: Final = "127.0.0.1"
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Start of an HTTP/2 connection: gRPC answers with a frame, servers of HTTP/1.1 with an error."""
_FRAMES: Final = frozenset({4, 7})
"""Types of the first frame of a server: SETTINGS, GOAWAY."""
_FRAME_HEAD: Final = 9
_ALERT: Final = b"\x15\x03"
"""Start of a TLS alert, which answers plain text."""
_PROBE_SECONDS: Final = 10.0
_LAST_PORT: Final = 65_535
_PORTS: Final = re.compile(r"ports\(([^)]*)\)")
_START: Final = "is the server running? ovms serve PATH starts one"


class Protocol(StrEnum):
    """Protocol of a port."""

    GRPC = "gRPC"
    REST = "REST"


_SCHEMES: Final = {
    "grpc": Protocol.GRPC,
    "grpcs": Protocol.GRPC,
    "http": Protocol.REST,
    "https": Protocol.REST,
}
_DEFAULT_PORTS: Final = {Protocol.GRPC: 9000, Protocol.REST: 8000}
_GRPC_TARGETS: Final = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
"""Prefixes of address forms that only gRPC has."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the options ``--ca``, ``--cert`` and ``--key``."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def are_given(self) -> bool:
        """True if TLS is used without a scheme that says so."""
        return self.ca is not None or self.cert is not None


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Server that a command calls: ``address`` is ``host:port`` or a gRPC target, ``path`` that of a URL."""

    protocol: Protocol
    address: str
    tls: ClientTls | None = None
    path: str = ""

    @property
    def url(self) -> str:
        """Return the address with its scheme."""
        secure = "" if self.tls is None else "s"
        scheme = "http" if self.protocol is Protocol.REST else "grpc"
        is_target = self.address.startswith(_GRPC_TARGETS)
        return self.address if is_target else f"{scheme}{secure}://{self.address}{self.path}"


def find_server(
    url: str,
    *,
    protocol: Protocol | None = None,
    needs: Protocol | None = None,
    prefers: Protocol = Protocol.GRPC,
    tls: TlsFiles = TlsFiles(),
    timeout: float = _PROBE_SECONDS,
) -> ServerAddress:
    """Find the protocol and the address of a server.

    Args:
        url: ``http://``, ``https://``, ``grpc://``, ``grpcs://``, ``host:port``, ``unix:/path``; empty: this machine.
        protocol: protocol that the user names, which is not probed.
        needs: the only protocol that the command can use.
        prefers: protocol of which the default port is tried first without a URL.
        tls: TLS files.
        timeout: of a probe, in seconds.

    Raises:
        InvalidRequest: the URL is malformed.
        Unreachable: nothing answers, or the server does not tell the port of the protocol that the command needs.
    """
    protocol = protocol or needs if not url else protocol
    found = _read(url, protocol, tls)
    seconds = min(timeout, _PROBE_SECONDS)
    if not url and protocol is None:
        found = _find_default(found, prefers, seconds)
    elif protocol is None and "://" not in url and not url.startswith(_GRPC_TARGETS):
        found = replace(found, protocol=_probe_or_raise(found, seconds))
    if needs is None or found.protocol is needs or protocol is not None:
        return found
    return _other_port(found, needs, timeout)


def _read(url: str, protocol: Protocol | None, tls: TlsFiles) -> ServerAddress:
    if url.startswith(_GRPC_TARGETS):
        return ServerAddress(Protocol.GRPC, url, ClientTls(tls.ca, tls.cert, tls.key) if tls.are_given else None)
    scheme, has_scheme, rest = url.rpartition("://")
    if has_scheme and scheme not in _SCHEMES:
        raise InvalidRequest(
            f"--url: expected http://, https://, grpc://, grpcs:// or HOST:PORT, got {url}: scheme {scheme} is not "
            "supported"
        )
    spoken = protocol or _SCHEMES.get(scheme, Protocol.GRPC)
    address, slash, path = rest.partition("/")
    _, colon, port = address.rpartition(":")
    has_port = bool(colon) and not port.endswith("]")
    if has_port and not (port.isascii() and port.isdecimal() and int(port) <= _LAST_PORT):
        raise InvalidRequest(f"{address}: expected HOST:PORT with a port up to {_LAST_PORT}, got {port!r}")
    is_secure = scheme in {"https", "grpcs"} or tls.are_given
    files = ClientTls(tls.ca, tls.cert, tls.key) if is_secure else None
    if not has_port:
        address = f"{address or _HOST}:{_DEFAULT_PORTS[spoken]}"
    return ServerAddress(spoken, address, files, slash + path.rstrip("/") if path else "")


def _find_default(found: ServerAddress, prefers: Protocol, seconds: float) -> ServerAddress:
    """Return the default port of this machine at which a server answers."""
    order = sorted(Protocol, key=lambda each: each is not prefers)
    for each in order:
        tried = replace(found, address=f"{_HOST}:{_DEFAULT_PORTS[each]}")
        try:
            answering = _probe(tried, seconds)
        except OSError:
            continue
        if answering is not None:
            return replace(tried, protocol=answering)
    ports = " or ".join(str(_DEFAULT_PORTS[each]) for each in order)
    raise Unreachable(f"nothing listens at {_HOST}, port {ports}; {_START}, --url names another address")


# -- Ports that answer -------------------------------------------------------------------------------------------------


def _probe_or_raise(server: ServerAddress, seconds: float) -> Protocol:
    try:
        answering = _probe(server, seconds)
    except OSError as error:
        raise Unreachable(_silence(server, error, seconds)) from None
    if answering is None:
        hint = _other_security(server, seconds) or "is this the port of a server?"
        raise Unreachable(f"{server.address} answers neither HTTP nor gRPC; {hint}")
    return answering


def _probe(server: ServerAddress, seconds: float) -> Protocol | None:
    """Return the protocol that answers at an address, None if it is neither.

    Raises:
        OSError: nothing listens there, or nothing answers in time.
    """
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), seconds) as plain:
        plain.settimeout(seconds)
        if server.tls is None:
            return _answering(plain)
        context = server.tls.context()
        # The call that follows checks the certificate.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2", "http/1.1"])
        try:
            with context.wrap_socket(plain, server_hostname=host.strip("[]")) as secure:
                return _answering(secure)
        except ssl.SSLError:
            return None


def _answering(connection: socket.socket) -> Protocol | None:
    connection.sendall(_PREFACE)
    start = b""
    try:
        while len(start) < _FRAME_HEAD and (more := connection.recv(_FRAME_HEAD - len(start))):
            start += more
    except ConnectionError:
        return None
    if not start or start.startswith(_ALERT):
        return None
    return Protocol.GRPC if len(start) == _FRAME_HEAD and start[3] in _FRAMES else Protocol.REST


def _silence(server: ServerAddress, error: OSError, seconds: float) -> str:
    """Return the text of a failed probe, with a standard port of that host that answers."""
    if isinstance(error, TimeoutError):
        reason = f"no server answers at {server.address} within {seconds:g} s"
    elif isinstance(error, socket.gaierror):
        return f"no server answers at {server.address}: {error.strerror}"
    else:
        reason = f"no server answers at {server.address}: {error.strerror or error}"
    others = _answering_ports(server, min(seconds, 1.0))
    return f"{reason}; {others}" if others else f"{reason}; {_START}"


def _answering_ports(server: ServerAddress, seconds: float) -> str:
    """Return which standard ports of a host answer, as a hint; empty if none does."""
    host = server.address.rpartition(":")[0]
    hints = []
    for port in _DEFAULT_PORTS.values():
        other = replace(server, address=f"{host}:{port}", path="")
        try:
            answering = None if other.address == server.address else _probe(other, seconds)
        except OSError:
            continue
        if answering is not None:
            hints.append(f"{answering} answers at {other.address}")
    return f"{' and '.join(hints)}: use --url with that address" if hints else ""


def unreachable_hint(server: ServerAddress, seconds: float) -> str:
    """Return why a call that got no answer failed: the other protocol, another port, or no server."""
    if server.address.startswith(_GRPC_TARGETS):
        return _START
    seconds = min(seconds, 1.0)
    try:
        answering = _probe(server, seconds)
    except OSError:
        return _answering_ports(server, seconds) or _START
    if answering is None:
        return _other_security(server, seconds) or _START
    if answering is not server.protocol:
        right = replace(server, protocol=answering, path="")
        return f"{server.address} answers {answering}: use --url {right.url}"
    return _START


def _other_security(server: ServerAddress, seconds: float) -> str:
    """Return the URL of a port that answers with TLS only, or without TLS only, as a hint; empty if there is none."""
    other = replace(server, tls=ClientTls() if server.tls is None else None, path="")
    try:
        answering = _probe(other, seconds)
    except OSError:
        return ""
    if answering is None:
        return ""
    right = replace(other, protocol=answering)
    return f"it answers {answering} {'without' if other.tls is None else 'with'} TLS: use --url {right.url}"


# -- The other port of a server ----------------------------------------------------------------------------------------


def _other_port(server: ServerAddress, needs: Protocol, timeout: float) -> ServerAddress:
    """Return the address of the same server for the other protocol, which its metadata has."""
    host = server.address.rpartition(":")[0]
    port = _port_of(_extensions(server, timeout), needs)
    if port is not None and host:
        other = replace(server, protocol=needs, address=f"{host}:{port}", path="")
        try:
            if _probe(other, min(timeout, _PROBE_SECONDS)) is needs:
                return other
        except OSError:
            pass
    hint = _answering_ports(server, 1.0) if host else ""
    scheme = "http" if needs is Protocol.REST else "grpc"
    raise Unreachable(
        f"{server.address} answers {server.protocol}, and this command needs {needs}; "
        + (hint or f"name that port: --url {scheme}://HOST:PORT")
    )


def _extensions(server: ServerAddress, timeout: float) -> Sequence[str]:
    try:
        with open_client(server.address, rest=server.protocol is Protocol.REST, timeout=timeout, tls=server.tls) as one:
            return one.server_metadata().extensions
    except ServerError:
        return ()


def _port_of(extensions: Sequence[str], protocol: Protocol) -> int | None:
    """Return a port in the extension ``ports(grpc=9000,rest=8000)`` of a server's metadata."""
    for each in extensions:
        if (listed := _PORTS.fullmatch(each)) is not None:
            ports = dict(pair.split("=", 1) for pair in listed[1].split(",") if "=" in pair)
            port = ports.get(protocol.lower(), "")
            return int(port) if port.isdecimal() else None
    return None
