"""Connection options of client commands, and the exit codes for refused or unanswered calls."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import ending_with, fail
from ovmstrio.cli.exits import EX_INTERRUPTED, EX_UNREACHABLE, EX_USAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.client import Client, ClientTls

Url = Annotated[
    str,
    typer.Option(
        "--url",
        metavar="URL",
        rich_help_panel="Connection",
        help="HOST:PORT of the server; default: 127.0.0.1:9000, with --rest 127.0.0.1:8000.",
    ),
]
Rest = Annotated[bool, typer.Option("--rest/--grpc", rich_help_panel="Connection", help="Protocol of the calls.")]
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


def open_tls(url: str, ca: Path | None, cert: Path | None, key: Path | None) -> ClientTls | None:
    """Return the TLS settings of a client, None without TLS options."""
    from ovmstrio.client import ClientTls

    if (cert is None) != (key is None):
        fail("--cert and --key require each other", EX_USAGE)
    secure = url.startswith(("https://", "grpcs://")) or ca is not None or cert is not None
    return ClientTls(ca, cert, key) if secure else None


@contextmanager
def asking(
    url: str, *, rest: bool, timeout: float, ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> Iterator[Client]:
    """Yield a client; exit with 1 if the server refuses a call, with 2 if it does not answer."""
    from ovmstrio.client import Unreachable, open_client
    from ovmstrio.core.errors import ServerError

    tls = open_tls(url, ca, cert, key)
    with ending_with(EX_USAGE, ServerError):
        opened = open_client(url, rest=rest, timeout=timeout, tls=tls)
    try:
        with opened as client:
            yield client
    except Unreachable as error:
        fail(f"{error.message}; is the server running? --url sets its address", EX_UNREACHABLE)
    except ServerError as error:
        fail(error.message)
    except OSError as error:
        fail(f"{error.filename or url}: {error.strerror or error}")
    except KeyboardInterrupt:
        raise typer.Exit(EX_INTERRUPTED) from None
