"""Calls of handlers by ``ovms infer``: a file or JSON is the body of a POST, and the response is shown or saved."""

from __future__ import annotations

import json
import mimetypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from ovmstrio.cli.console import echo, print_message
from ovmstrio.cli.tensor_contents import sniff
from ovmstrio.cli.tensor_files import is_inline_json
from ovmstrio.cli.tensor_output import FORMS
from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.client import Client, Posted

_STANDARD_INPUT: Final = "-"
_JSON: Final = "application/json"
_BYTES: Final = "application/octet-stream"


def post_file(client: Client, handler: str, given: Sequence[str], target: str) -> None:
    """Send a file to a handler, and show or save the response.

    Args:
        client: a REST client.
        handler: name of the handler.
        given: one file, JSON, or ``-`` for standard input.
        target: ``table``, ``json`` and ``csv`` print the response; any other value is the file to save the body to.

    Raises:
        InvalidRequest: not exactly one file was given, or the client uses gRPC.
        OSError: a file cannot be read or written.
        ServerError: the handler answered with an error.
    """
    if len(given) != 1:
        raise InvalidRequest(f"{handler} is a handler and takes one body: expected one input, got {len(given)}")
    (file,) = given
    if is_inline_json(file, is_scalar_taken=True):
        content, content_type = file.encode(), _JSON
    else:
        content = sys.stdin.buffer.read() if file == _STANDARD_INPUT else Path(file).read_bytes()
        content_type = _content_type(file, content)
    answer = client.post(handler, content, content_type)
    if target in FORMS:
        _print(answer)
    else:
        Path(target).write_bytes(answer.body)
        print_message(f"saved {target}", style="")


def _content_type(file: str, content: bytes) -> str:
    guessed, _ = mimetypes.guess_type(file)
    if guessed is None and sniff(content) == ".json":
        return _JSON
    return guessed or _BYTES


def _print(answer: Posted) -> None:
    if answer.content_type.startswith(_JSON) and (shown := _indented(answer.body)) is not None:
        typer.echo(shown)
    elif sys.stdout.isatty():
        echo(answer.body.decode(errors="replace"))
    elif answer.content_type.startswith("text/"):
        typer.echo(answer.body.decode(errors="replace"))
    else:
        sys.stdout.buffer.write(answer.body)


def _indented(body: bytes) -> str | None:
    """Return JSON with indentation; None if the body is not JSON, as handlers set their content types themselves."""
    try:
        return json.dumps(json.loads(body), indent=2)
    except (ValueError, RecursionError):
        return None
