"""TLS whose certificates may change while a server listens: connections that are accepted later have the new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import trio

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

__all__ = ["ReloadedTls", "TlsListener"]


class ReloadedTls:
    """The TLS settings that connections have now.

    Args:
        make: makes the settings of the files as they are; blocking.

    Raises:
        OSError: as ``make``.

    Attributes:
        context: of connections that are accepted from now on; a new object whenever the files were read again, so
            that an authority that is no more in its file is not trusted any more.
    """

    def __init__(self, make: Callable[[], ssl.SSLContext]) -> None:
        self._make: Final = make
        self.context = make()

    def read_again(self) -> None:
        """Make the settings again; blocking.

        Raises:
            OSError: as ``make``; the settings stay as they were.
        """
        self.context = self._make()


class TlsListener(trio.abc.Listener[trio.SSLStream[Any]]):
    """Accepts connections of another listener with the TLS settings of the time.

    Args:
        transport_listener: accepts connections; closed with this one.
        tls: the settings.

    Attributes:
        transport_listener: as given.
    """

    def __init__(self, transport_listener: trio.abc.Listener[Any], tls: ReloadedTls) -> None:
        self.transport_listener = transport_listener
        self._tls = tls

    async def accept(self) -> trio.SSLStream[Any]:
        """Accept one connection, whose handshake is the caller's to make."""
        stream = await self.transport_listener.accept()
        return trio.SSLStream(stream, self._tls.context, server_side=True, https_compatible=True)

    async def aclose(self) -> None:
        """Close the other listener."""
        await self.transport_listener.aclose()
