"""Where a project listens, and what to do if it cannot."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.command_line import listen_addresses
from ovmstrio.wire.listeners import open_listeners

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

    from ovmstrio.project_server.settings import ProjectSettings
    from ovmstrio.runtimes.handlers.config.project_spec import ProjectSpec
    from ovmstrio.wire.listeners import Listener

__all__ = ["open_project_listeners", "port_of"]

_WAY_OUT: Final = "choose another port with --port or 'serve_port', or end the program that has this one"


def port_of(project: ProjectSpec, settings: ProjectSettings) -> int:
    """Give the port that a project is called at."""
    return project.serve_port if settings.port is None else settings.port


@asynccontextmanager
async def open_project_listeners(
    project: ProjectSpec, settings: ProjectSettings, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[Listener]]:
    """Listen while the block lasts.

    Raises:
        ConfigError: an address is not understood.
        OSError: an address cannot be bound; its notes name it.

    Ownership: the listeners.
    Cancellation: at any checkpoint.
    """
    addresses = listen_addresses(settings.bind_address, port_of(project, settings), zero_is_any=True)
    async with AsyncExitStack() as stack:
        try:
            listeners = await stack.enter_async_context(open_listeners(addresses, tls))
        except ValueError as error:
            raise ConfigError([Problem(str(error))]) from error
        except OSError as error:
            error.add_note(f"cannot listen at {', '.join(addresses)}")
            if error.errno == errno.EADDRINUSE:
                error.add_note(_WAY_OUT)
            raise
        yield listeners
