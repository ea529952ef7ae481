"""``ovms stream``: stream to a graph, and show its responses as they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.console import EX_USAGE, exit_on_error, fail
from ovmstrio.cli.server_options import Ca, Cert, Key, Rest, Url, asking, model_metadata
from ovmstrio.cli.tables import FORMATS, JsonOption, Output, chosen

if TYPE_CHECKING:
    from collections.abc import Generator

    from ovmstrio.client.api import StreamReply

_METADATA_SECONDS = 10.0


_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the graph.")]
_Inputs = Annotated[
    list[str] | None,
    typer.Argument(metavar="INPUT", help="TEXT or FILE; INPUT=... if the graph has several inputs."),
]
_Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="Name of the graph, instead of the first argument.")
]
_Given = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="[NAME=]VALUE",
        help="TEXT, or a FILE that exists (@FILE always names a file; .npy as an array). NAME if the graph has "
        "several inputs. May be repeated.",
    ),
]
_Requests = Annotated[
    str,
    typer.Option(
        "--requests",
        metavar="FILE",
        help='JSON lines with one request each: {"inputs": {NAME: TEXT or numbers}, "timestamp": .., '
        '"parameters": {..}}; - is standard input.',
    ),
]
_Timestamp = Annotated[
    int | None, typer.Option("--timestamp", metavar="N", help="Timestamp of the request; default: set by the server.")
]
_Parameter = Annotated[
    list[str] | None,
    typer.Option(
        "--parameter",
        metavar="NAME=VALUE",
        help="A request parameter: an integer, true, false, or text, which may be quoted: '\"5\"'.",
    ),
]
_Format = Annotated[
    Output,
    typer.Option(
        "--format",
        metavar=FORMATS,
        help="Format of the output; table: texts as they grow, json: a line for each response, csv: a row for each "
        "output.",
    ),
]
_Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print each output with its timestamp, and the times at the end.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stream)


def stream(
    name: _Name = "",
    inputs: _Inputs = None,
    *,
    model: _Model = None,
    given: _Given = None,
    requests: _Requests = "",
    timestamp: _Timestamp = None,
    parameter: _Parameter = None,
    form: _Format = Output.TABLE,
    as_json: JsonOption = False,
    verbose: _Verbose = False,
    url: Url = "",
    rest: Rest = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Stream to a graph, and show its responses as they arrive. Ctrl-C cancels the stream on the server at once.

    Exit codes: 0 on success, 1 if the stream or a request failed, 2 if the server does not answer, 64 if the command
    line is wrong, 130 if it is interrupted.
    """
    from ovmstrio.cli.stream_requests import are_typed, one_request, read_lines
    from ovmstrio.core.errors import InvalidRequest

    inputs_given = [*(inputs or []), *(given or [])]
    if model is not None and name:
        inputs_given.insert(0, name)
    if not (model := model or name):
        fail("expected a graph: ovms stream NAME INPUT, or --model NAME", EX_USAGE)
    if bool(inputs_given) == bool(requests):
        fail("expected either an input or --requests", EX_USAGE)
    if requests and (timestamp is not None or parameter):
        fail("--timestamp and --parameter need an input; lines of --requests contain their own", EX_USAGE)
    # A stream over REST has one request.
    needs = "gRPC" if requests else ""
    with asking(url, rest=rest, needs=needs, timeout=_METADATA_SECONDS, ca=ca, cert=cert, key=key) as client:
        names = [tensor.name for tensor in model_metadata(client, model).inputs]
        with exit_on_error(EX_USAGE, InvalidRequest):
            if requests:
                stream_requests = read_lines(requests, names)
            else:
                stream_requests = iter([one_request(inputs_given, names, timestamp, parameter or [])])
        _show(
            client.stream(model, stream_requests),
            chosen(form, as_json=as_json),
            verbose=verbose,
            live=not are_typed(requests),
        )


def _show(replies: Generator[StreamReply], form: Output, *, verbose: bool, live: bool) -> None:
    """Show a stream; end the command with 1 if the stream or one of its requests failed."""
    from ovmstrio.cli.stream_show import show
    from ovmstrio.cli.stream_text import Seen, safe_for_terminals
    from ovmstrio.core.errors import ServerError
    from ovmstrio.encoding.status_errors import Unreachable, status_of

    seen = Seen()
    try:
        show(replies, seen, form, verbose=verbose, live=live)
    except Unreachable:
        raise
    except ServerError as error:
        status = status_of(error)
        if error.message == seen.problem:
            fail(f"the stream ended with {status}")
        fail(safe_for_terminals(error.message) + (f" ({status})" if status else ""))
    if seen.problem:
        raise typer.Exit(1)
