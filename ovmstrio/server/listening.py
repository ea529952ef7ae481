"""Where a server listens, with TLS or without, and what to do if it cannot."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.wire.listeners import open_listeners, tls_context

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.wire.listeners import Listener

__all__ = ["make_tls", "open_noted_listeners"]

HTTP: Final = "http/1.1"
HTTP2: Final = "h2"


def make_tls(settings: ServerSettings, protocol: str) -> ssl.SSLContext | None:
    """Make the TLS settings of one protocol, None for plain connections; blocking.

    Raises:
        ConfigError: the files cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        return tls_context(settings.tls_cert, settings.tls_key, settings.client_ca, protocol=protocol)
    except OSError as error:
        # The ssl module does not say which file it means.
        files = ", ".join(
            f"--{name} {path}"
            for name in ("tls_cert", "tls_key", "client_ca")
            if (path := getattr(settings, name)) is not None
        )
        raise ConfigError([Problem(f"TLS cannot be set up from {files}: {error.strerror or error}")]) from error


@asynccontextmanager
async def open_noted_listeners(
    addresses: Sequence[str], tls: ssl.SSLContext | None, options: str
) -> AsyncIterator[list[Listener]]:
    """Listen while the block lasts.

    Args:
        addresses: where: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 lets the system choose.
        tls: what connections are wrapped in; None for nothing.
        options: by which another port is chosen.

    Raises:
        ConfigError: an address is not understood.
        OSError: an address cannot be bound; its notes name it, and the way out.

    Ownership: the listeners.
    Cancellation: at any checkpoint.
    """
    async with AsyncExitStack() as stack:
        try:
            listeners = await stack.enter_async_context(open_listeners(addresses, tls))
        except ValueError as error:
            raise ConfigError([Problem(str(error))]) from error
        except OSError as error:
            error.add_note(f"cannot listen at {', '.join(addresses)}")
            if error.errno == errno.EADDRINUSE:
                error.add_note(f"choose another port with {options}, or end the program that has this one")
            raise
        yield listeners
