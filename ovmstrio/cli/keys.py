"""``ovms keys``: add, list and revoke callers in the key file of ``ovms serve --keys-file``."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import data_table, exit_on_error, fail, print_json, print_message
from ovmstrio.cli.exits import EX_USAGE
from ovmstrio.cli.problems import safe
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, show_data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from ovmstrio.auth.key_file import CallerEntry

_DEFAULT: Final = Path("keys.json")

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the caller in logs.")]
_File = Annotated[Path, typer.Option("--file", metavar="FILE", help="The key file.")]
_Scope = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help="Scope: read, metrics, admin or infer:PATTERN. Repeatable.",
        show_default="infer:*",
    ),
]
_RequestsPerSecond = Annotated[
    float,
    typer.Option(
        "--requests-per-second", min=0, metavar="N", help="Average limit of requests per second; 0 = unlimited."
    ),
]
_Concurrency = Annotated[
    int, typer.Option("--concurrency", min=0, metavar="N", help="Limit of concurrent requests; 0 = unlimited.")
]
_TokensPerMinute = Annotated[
    int,
    typer.Option(
        "--tokens-per-minute",
        min=0,
        metavar="N",
        help="Average limit of prompt and completion tokens per minute; 0 = unlimited.",
    ),
]
_Expires = Annotated[
    str, typer.Option("--expires", metavar="DATE", help="First day (YYYY-MM-DD, UTC) on which the key is invalid.")
]
_Certificate = Annotated[
    str,
    typer.Option(
        "--certificate",
        metavar="NAME",
        help="Identify the caller by a client certificate with this name instead of a key.",
    ),
]
_Subject = Annotated[
    str,
    typer.Option("--subject", metavar="NAME", help="Identify the caller by tokens with this subject instead of a key."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Create, list and revoke keys of callers.")
    group.command()(new)
    group.command(name="list")(list_keys)
    group.command()(revoke)
    app.add_typer(group, name="keys")


def new(
    name: _Name,
    *,
    file: _File = _DEFAULT,
    scope: _Scope = None,
    requests_per_second: _RequestsPerSecond = 0,
    concurrency: _Concurrency = 0,
    tokens_per_minute: _TokensPerMinute = 0,
    expires: _Expires = "",
    certificate: _Certificate = "",
    subject: _Subject = "",
    as_json: JsonOption = False,
) -> None:
    """Add a caller to the key file and print its key, which is shown only once: the file holds its hash.

    A running server reloads the file within a second. Exit code 1 if the caller exists already, or the file cannot be
    used.
    """
    from datetime import UTC, datetime

    from ovmstrio.auth.key_file import CallerEntry, key_hash, new_key
    from ovmstrio.core.callers import Scopes

    with exit_on_error(EX_USAGE, ValueError):
        scopes = Scopes.parse(scope or ["infer:*"])
    if certificate and subject:
        fail("--certificate and --subject cannot be combined", EX_USAGE)
    key = "" if certificate or subject else new_key()
    entry = CallerEntry(
        name,
        scopes,
        key_hash(key) if key else "",
        certificate,
        subject,
        requests_per_second,
        concurrency,
        f"{datetime.now(UTC):%Y-%m-%d}",
        expires,
        tokens_per_minute,
    )
    with _locked(file):
        entries = _read(file) if file.exists() else []
        if any(each.name == name for each in entries):
            fail(f"{file}: caller {name!r} exists already; remove it with: ovms keys revoke {name}")
        _write(file, [*entries, entry])
    if as_json:
        print_json({**entry.document(), "key": key})
    elif key:
        print_message(f"{name!r} may {', '.join(scopes.texts())}. Its key, which is shown only once:")
        typer.echo(key)


def list_keys(*, file: _File = _DEFAULT, form: FormatOption = Output.TABLE, as_json: JsonOption = False) -> None:
    """List the callers of the key file, with the first 8 digits of their keys' hashes."""
    entries = [replace(each, sha256=each.sha256[:8]) for each in _read(file)]
    show_data(_table(entries), [each.document() for each in entries], form, as_json=as_json)


def revoke(name: _Name, *, file: _File = _DEFAULT) -> None:
    """Remove a caller from the key file; a running server refuses the caller within a second.

    Exit code 1 if there is no such caller, or the file cannot be used.
    """
    with _locked(file):
        entries = _read(file)
        kept = [each for each in entries if each.name != name]
        if len(kept) == len(entries):
            fail(f"{file}: there is no caller {name!r}; list callers with: ovms keys list")
        _write(file, kept)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Exclude other commands that change the file, until the end of the block."""
    from ovmstrio.util.file_updates import lock_folder

    with ExitStack() as stack:
        try:
            stack.enter_context(lock_folder(file))
        except OSError as error:
            fail(f"{file}: {error.strerror or error}")
        yield


def _read(file: Path) -> list[CallerEntry]:
    from ovmstrio.auth.key_file import read_key_file
    from ovmstrio.core.errors import ConfigError

    try:
        return read_key_file(file)
    except ConfigError as error:
        fail(error.message)


def _write(file: Path, entries: list[CallerEntry]) -> None:
    """Check the new contents, and write the file."""
    import json

    from ovmstrio.auth.key_file import parse_callers, write_key_file
    from ovmstrio.core.errors import ConfigError

    try:
        parse_callers(json.dumps({"callers": [each.document() for each in entries]}).encode(), str(file))
        write_key_file(file, entries)
    except ConfigError as error:
        fail(error.message)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")


def _table(entries: list[CallerEntry]) -> Table:
    table = data_table("name", "by", "scopes", "requests/s", "at once", "tokens/min", "created", "expires")
    for each in entries:
        by = f"key {each.sha256}..." if each.sha256 else f"{each.proof} {each.certificate or each.subject}"
        limits = (f"{limit:g}" if limit else "any" for limit in _limits(each))
        cells = (each.name, by, ", ".join(each.scopes.texts()), *limits, each.created, each.expires or "never")
        table.add_row(*map(safe, cells))
    return table


def _limits(entry: CallerEntry) -> tuple[float, ...]:
    return entry.requests_per_second, entry.concurrency, entry.tokens_per_minute
