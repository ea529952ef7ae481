"""TLS listener whose certificates can be reloaded; new connections use the new certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable


class ReloadableTls:
    """Reloadable TLS settings.

    Args:
        make: creates the settings from the files; blocking, may raise ``OSError``.

    Attributes:
        context: settings for new connections; a new object after each reload, so that removed CAs are no longer
            trusted.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext]) -> None:
        self._make: Final = make
        self.context = make()

    def reload(self) -> None:
        """Reload the files; blocking. On ``OSError`` the settings are unchanged."""
        self.context = self._make()


class TlsListener(trio.abc.Listener[trio.SSLStream[Any]]):
    """TLS listener over another listener, which it closes, with reloadable settings."""

    def __init__(self, transport_listener: trio.abc.Listener[Any], tls: ReloadableTls) -> None:
        self.transport_listener = transport_listener
        self._tls = tls

    async def accept(self) -> trio.SSLStream[Any]:
        """Accept one connection; the caller performs the handshake."""
        stream = await self.transport_listener.accept()
        return trio.SSLStream(stream, self._tls.context, server_side=True, https_compatible=True)

    async def aclose(self) -> None:
        """Close the underlying listener."""
        await self.transport_listener.aclose()
