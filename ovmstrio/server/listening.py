"""Where a server listens, with TLS or without, and what to do if it cannot."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.serving.fingerprints import paths_mark
from ovmstrio.transport.listeners import open_listeners, tls_context
from ovmstrio.transport.tls import ReloadedTls

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.server.settings import ServerSettings
    from ovmstrio.transport.listeners import Listener

__all__ = ["Certificates", "open_noted_listeners"]

# ----------------------------------------------------------------------
# Where a server listens, with TLS or without, and what to do if it cannot
# ----------------------------------------------------------------------

HTTP: Final = "http/1.1"
HTTP2: Final = "h2"


@asynccontextmanager
async def open_noted_listeners(
    addresses: Sequence[str], tls: ReloadedTls | None, options: str
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


# ----------------------------------------------------------------------
# The TLS settings of a server's protocols, made of the files that its settings name, and again when they change
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_OPTIONS = ("tls_cert", "tls_key", "client_ca")


class Certificates:
    """The certificates of one server.

    Args:
        settings: name the files.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._files = [path for option in _OPTIONS if (path := getattr(settings, option)) is not None]
        self._mark = paths_mark(self._files)
        self._tls: dict[str, ReloadedTls] = {}

    def tls(self, protocol: str) -> ReloadedTls | None:
        """Make the TLS settings of one protocol, as ALPN calls it; None for plain connections; blocking.

        Raises:
            ConfigError: the files cannot be used.
        """
        if self._settings.tls_cert is None or self._settings.tls_key is None:
            return None
        if protocol not in self._tls:
            self._tls[protocol] = ReloadedTls(partial(self._make, protocol))
        return self._tls[protocol]

    def _make(self, protocol: str) -> ssl.SSLContext:
        settings = self._settings
        if settings.tls_cert is None or settings.tls_key is None:
            raise ConfigError([Problem("no certificate is given")])
        try:
            return tls_context(settings.tls_cert, settings.tls_key, settings.client_ca, protocol=protocol)
        except OSError as error:
            # The ssl module does not say which file it means.
            files = ", ".join(f"--{name} {path}" for name in _OPTIONS if (path := getattr(settings, name)) is not None)
            raise ConfigError([Problem(f"TLS cannot be set up from {files}: {error.strerror or error}")]) from error

    async def look(self) -> bool:
        """Read the files again if they have changed; connections that are open keep what they have.

        Files that do not fit together, as while they are being replaced, leave all as it was, and are looked at again.

        Cancellation: while they are read.
        """
        mark = await trio.to_thread.run_sync(paths_mark, self._files)
        if mark == self._mark or not self._tls:
            return True
        self._mark = mark
        try:
            await trio.to_thread.run_sync(self._read_again)
        except ConfigError as error:
            log.error("certificates cannot be read again; those known stay", reason=error.message)  # noqa: TRY400 - the user's
        else:
            log.info("certificates read again")
        return True

    def _read_again(self) -> None:
        for tls in self._tls.values():
            tls.read_again()
