"""Endpoints of remote models: protocol, errors, and connections with optional TLS."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from ovmstrio.core.errors import ConfigError, NotReady, Problem, ServerError
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, INVALID, Dim, TensorSpec
from ovmstrio.util.regular_files import check_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ovmstrio.config.remote_entries import RemoteAddress, RemoteTls
    from ovmstrio.core.request import InferRequest, InferResponse


class NotSent(NotReady):
    """Call that the server did not process, so that it may be sent again."""


@dataclass(frozen=True, slots=True)
class RemoteDescription:
    """Metadata of a remote model."""

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Endpoint(Protocol):
    """Client of one model at one address."""

    @property
    def address(self) -> str:
        """Configured address."""
        ...

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        """Run one inference with a time limit; model names and versions in request and response are ignored.

        Raises NotSent if the server did nothing, NotReady if the connection was lost or the server is not ready, and
        errors of the server with the address appended.  Cancellation cancels the call on the server.
        """
        ...

    async def describe(self) -> RemoteDescription:
        """Return the model's metadata; raises as :meth:`infer`."""
        ...

    async def unready_reason(self) -> str:
        """Return why the model cannot be called, empty if it can; raises as :meth:`infer`."""
        ...

    def doubt(self) -> None:
        """Handle missing responses: close a connection that may be dead."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


def append_address(error: ServerError, address: str) -> ServerError:
    """Append the address to an error; clients match on the start of its text."""
    error.message = f"{error.message}; reported by {address}"
    error.args = (error.message,)
    return error


def make_tensor_spec(name: str, datatype: str, shape: Iterable[int]) -> TensorSpec:
    """Return the tensor spec for a server's metadata; negative sizes are dynamic."""
    dims: Sequence[Dim] = [Dim.fixed(size) if size >= 0 else ANY_SIZE for size in shape]
    return TensorSpec(name, BY_NAME.get(datatype, INVALID), tuple(dims), 0 if dims else None)


# ----------------------------------------------------------------------
# Connections
# ----------------------------------------------------------------------


def client_tls(tls: RemoteTls, *, is_grpc: bool) -> ssl.SSLContext:
    """Load the TLS settings' files; blocking; raises ConfigError.

    gRPC needs ALPN: gRPC servers close connections that did not negotiate HTTP/2.
    """
    try:
        if tls.ca is not None:
            check_regular(tls.ca)
        context = ssl.create_default_context(cafile=tls.ca)
    except OSError as error:
        raise _tls_error("tls.ca", f"CA certificate {tls.ca} cannot be read", error) from None
    if tls.cert is not None:
        try:
            for path in (tls.cert, tls.key):
                if path is not None:
                    check_regular(path)
            context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise _tls_error("tls.cert", f"certificate {tls.cert} with its key cannot be read", error) from None
    if is_grpc:
        context.set_alpn_protocols(["h2"])
    return context


def _no_password() -> str:
    """Reject an encrypted key, for which OpenSSL would prompt at the terminal."""
    raise ValueError("the key is encrypted")


def _tls_error(path: str, message: str, error: Exception) -> ConfigError:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ConfigError([Problem(f"{message}: {reason}", path=path)])


async def connect(
    address: RemoteAddress, tls: ssl.SSLContext | None, *, server_name: str, timeout_seconds: float
) -> trio.abc.Stream:
    """Connect to an address; the caller owns the stream.  Raises NotSent without a connection or TLS handshake."""
    stream: trio.abc.Stream | None = None
    try:
        with trio.fail_after(timeout_seconds):
            stream = await trio.open_tcp_stream(address.host, address.port)
            if tls is None:
                return stream
            wrapped = trio.SSLStream(stream, tls, server_hostname=server_name or address.host, https_compatible=True)
            await wrapped.do_handshake()
            return wrapped
    except trio.TooSlowError:
        failure = f"no connection within {timeout_seconds:g} s"
    except (OSError, trio.BrokenResourceError) as error:
        failure = _reason(error)
    except BaseException:
        if stream is not None:
            await trio.aclose_forcefully(stream)
        raise
    if stream is not None:
        await trio.aclose_forcefully(stream)
    raise NotSent(f"{address} cannot be reached: {failure}")


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    for each in (cause, error):
        if isinstance(each, ssl.SSLError):
            # errno of an SSLError is OpenSSL's number.
            return getattr(each, "verify_message", "") or each.reason or str(each)
        if isinstance(each, OSError) and (each.errno or each.strerror):
            # Trio's message would repeat the address.
            return os.strerror(each.errno) if each.errno and each.errno > 0 else str(each.strerror)
    return str(cause or error)
