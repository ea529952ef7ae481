"""The TLS settings of a server's protocols, made of the files that its settings name, and again when they change."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.wire.listeners import tls_context
from ovmstrio.wire.reloaded_tls import ReloadedTls

if TYPE_CHECKING:
    import ssl

    from ovmstrio.server.settings import ServerSettings

__all__ = ["Certificates"]

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
