"""Where a server listens, with TLS or without, and what to do if it cannot."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.wire.listeners import open_listeners

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ovmstrio.wire.listeners import Listener
    from ovmstrio.wire.reloaded_tls import ReloadedTls

__all__ = ["open_noted_listeners"]

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
