"""Listeners and TLS certificates of a server."""

from __future__ import annotations

import _ssl
import errno
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.settings import ServerSettings, option_name
from ovmstrio.server.watched_files import WatchedFiles
from ovmstrio.transport.listeners import open_listeners, tls_context
from ovmstrio.transport.tls import ReloadableTls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.transport.listeners import Listener

# Listeners

HTTP: Final = "http/1.1"
HTTP2: Final = "h2"


@asynccontextmanager
async def open_server_listeners(
    addresses: Sequence[str], tls: ReloadableTls | None, options: str
) -> AsyncIterator[list[Listener]]:
    """Open listeners for the block.

    Args:
        addresses: ``host:port``, ``[v6]:port`` or ``unix:/path``; port 0 is a free port.
        tls: TLS settings, or None.
        options: port options, for hints.

    Raises:
        ConfigError: an address is malformed.
        OSError: an address cannot be bound; notes have the address and a hint.
    """
    async with AsyncExitStack() as stack:
        try:
            listeners = await stack.enter_async_context(open_listeners(addresses, tls))
        except ValueError as error:
            raise ConfigError([Problem(str(error))]) from error
        except OSError as error:
            error.add_note(f"cannot listen at {', '.join(addresses)}")
            if error.errno == errno.EADDRINUSE:
                error.add_note(f"choose another port with {options}, or stop the program that uses it")
            raise
        yield listeners


# TLS certificates

log = structlog.get_logger(__name__)

_OPTIONS = ("tls_cert", "tls_key", "client_ca")


class Certificates:
    """TLS certificates of one server, reloaded when their files change."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._watched = WatchedFiles([path for option in _OPTIONS if (path := getattr(settings, option)) is not None])
        self._tls: dict[str, ReloadableTls] = {}

    def tls(self, protocol: str) -> ReloadableTls | None:
        """Return the TLS settings for an ALPN protocol, or None; blocking.

        Raises:
            ConfigError: the files are invalid.
        """
        if self._settings.tls_cert is None or self._settings.tls_key is None:
            return None
        if protocol not in self._tls:
            self._tls[protocol] = ReloadableTls(partial(self._make, protocol))
        return self._tls[protocol]

    def _make(self, protocol: str) -> ssl.SSLContext:
        settings = self._settings
        if settings.tls_cert is None or settings.tls_key is None:
            raise ConfigError([Problem("no certificate configured")])
        try:
            return tls_context(settings.tls_cert, settings.tls_key, settings.client_ca, protocol=protocol)
        except OSError as error:
            # The ssl module does not name the file.
            files = ", ".join(
                f"{option_name(name)} {path}" for name in _OPTIONS if (path := getattr(settings, name)) is not None
            )
            raise ConfigError([Problem(f"invalid TLS files {files}: {error.strerror or error}")]) from error

    def expiry_times(self) -> dict[tuple[str, ...], float]:
        """Return when the first certificate of each file expires, by option, in seconds since the epoch; blocking."""
        times: dict[tuple[str, ...], float] = {}
        for option in ("tls_cert", "client_ca"):
            path = getattr(self._settings, option)
            with suppress(OSError):
                if path is not None:
                    # The public interface of Python decodes certificates of connections only.
                    decoded = _ssl._test_decode_cert(str(path))  # type: ignore[attr-defined] # noqa: SLF001 - as above
                    times[option,] = ssl.cert_time_to_seconds(decoded["notAfter"])
        return times

    async def look(self) -> bool:
        """Reload changed certificates; open connections keep theirs.

        Files that do not match, as during their replacement, change nothing and are read again later.
        """
        reload = partial(trio.to_thread.run_sync, self._reload)
        if self._tls and await self._watched.read_changes(reload, "TLS certificates not reloaded"):
            log.info("TLS certificates reloaded")
        return True

    def _reload(self) -> None:
        for tls in self._tls.values():
            tls.reload()
