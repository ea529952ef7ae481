"""Connection options of client commands, and the exit codes for refused or unanswered calls."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovmstrio.cli.console import exit_on_error, fail, print_message
from ovmstrio.cli.exits import EX_INTERRUPTED, EX_UNREACHABLE, EX_USAGE
from ovmstrio.cli.help_text import DEPRECATED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.cli.server_address import Protocol, ServerAddress
    from ovmstrio.client import Client, ModelInfo

_MAX_NAMES: Final = 10
"""Models that a message lists."""

Url = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        rich_help_panel="Connection",
        help="HOST:PORT of the gRPC or REST port, also with http://, https://, grpc:// or grpcs://; unix:/path.",
        show_default="this machine",
    ),
]
Rest = Annotated[
    bool | None,
    typer.Option("--rest/--grpc", hidden=True, rich_help_panel=DEPRECATED, help="Protocol; --url names it."),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.001,
        max=86_400,
        metavar="SECONDS",
        rich_help_panel="Connection",
        help="Timeout of each call.",
    ),
]
Ca = Annotated[
    Path | None, typer.Option("--ca", metavar="FILE", rich_help_panel="Connection", help="TLS: trust this CA (PEM).")
]
Cert = Annotated[
    Path | None,
    typer.Option("--cert", metavar="FILE", rich_help_panel="Connection", help="TLS: the client's certificate (PEM)."),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", rich_help_panel="Connection", help="TLS: the certificate's key (PEM)."),
]


@contextmanager
def asking(url: str, *, timeout: float, **options: Any) -> Iterator[Client]:
    """Yield a client; the arguments and the exit codes are those of ``finding_server``."""
    from ovmstrio.client import open_client

    with finding_server(url, timeout=timeout, **options) as server:
        is_rest = server.protocol == "REST"
        with open_client(server.address, rest=is_rest, timeout=timeout, tls=server.tls) as client:
            yield client


def model_metadata(client: Client, model: str, version: str = "") -> ModelInfo:
    """Return the metadata of a model; for an unknown name, end the command with the names that the server has."""
    from ovmstrio.core.errors import NotFound, ServerError

    try:
        return client.metadata(model, version)
    except NotFound as error:
        with suppress(ServerError):  # a server without an index of models
            names = sorted({state.name for state in client.models()})
            if names and model not in names:
                more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
                fail(f"{error.message}; the server has {', '.join(names[:_MAX_NAMES])}{more}")
        raise


@contextmanager
def finding_server(
    url: str,
    *,
    timeout: float,
    rest: bool | None = None,
    needs: str = "",
    prefers: str = "gRPC",
    waits: bool = False,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
) -> Iterator[ServerAddress]:
    """Yield the address of a server; exit with 1 if it refuses a call of the block, with 2 if it does not answer.

    Args:
        url: value of ``--url``.
        timeout: of each call in seconds.
        rest: protocol that ``--rest`` or ``--grpc`` names.
        needs: the only protocol that the command can use, REST or gRPC.
        prefers: protocol of the default port that is tried first.
        waits: the command repeats calls until a server answers: without one, the port is that of ``needs``.
        ca: CA certificate of TLS.
        cert: the client's certificate.
        key: the certificate's key.
    """
    from ovmstrio.cli.server_address import Protocol, TlsFiles, find_server, unreachable_hint
    from ovmstrio.client import Unreachable
    from ovmstrio.core.errors import InvalidRequest, ServerError

    if (cert is None) != (key is None):
        fail("--cert and --key require each other", EX_USAGE)
    named = None if rest is None else Protocol.REST if rest else Protocol.GRPC
    if named is not None:
        _print_deprecation(named)
    needed = Protocol(needs) if needs else None
    tls = TlsFiles(ca, cert, key)
    find = partial(find_server, url, needs=needed, prefers=Protocol(prefers), tls=tls, timeout=timeout)
    server = None
    try:
        with exit_on_error(EX_USAGE, InvalidRequest):
            try:
                server = find(protocol=named)
            except Unreachable:
                if not waits:
                    raise
                server = find(protocol=needed)
        yield server
    except Unreachable as error:
        fail(
            error.message if server is None else f"{error.message}; {unreachable_hint(server, timeout)}", EX_UNREACHABLE
        )
    except ServerError as error:
        fail(error.message)
    except OSError as error:
        fail(f"{error.filename or url}: {error.strerror or error}")
    except KeyboardInterrupt:
        raise typer.Exit(EX_INTERRUPTED) from None


def _print_deprecation(protocol: Protocol) -> None:
    flag, scheme = ("--rest", "http") if protocol == "REST" else ("--grpc", "grpc")
    print_message(
        f"{flag} is deprecated; use --url {scheme}://HOST:PORT, or HOST:PORT for the protocol that answers there"
    )
