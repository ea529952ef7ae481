"""``ovms chat``: a conversation with a text model, through the server's OpenAI API."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import exit_on_error, fail
from ovmstrio.cli.exits import EX_FAILED, EX_USAGE
from ovmstrio.cli.server_options import Ca, Cert, Key, Url, finding_server
from ovmstrio.cli.tables import FORMATS, JsonOption, Output, chosen, print_csv

if TYPE_CHECKING:
    from ovmstrio.cli.chat_answers import ChatConversation
    from ovmstrio.client.chat_client import ChatClient

_Target = Annotated[
    str,
    typer.Argument(
        metavar="NAME|URL",
        help="Name of the model, or URL of a server such as http://localhost:8000/v3. Default: the first model that "
        "the server on this machine lists.",
        show_default=False,
    ),
]
_Once = Annotated[
    str | None,
    typer.Option("--once", metavar="TEXT", help="Send one message and exit; - reads it from standard input."),
]
_Model = Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model, if the argument is a URL.")]
_System = Annotated[str, typer.Option("--system", metavar="TEXT", help="System message.")]
_MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Maximum number of tokens per answer.")
]
_Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0,
        max=2,
        metavar="NUMBER",
        help="Sampling temperature; 0 always takes the most likely token.",
    ),
]
_TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        min=0,
        max=1,
        metavar="NUMBER",
        help="Nucleus sampling: cumulative probability of the tokens to sample from.",
    ),
]
_Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="N", help="Seed of sampling; the same seed gives the same answer."),
]
_ApiKey = Annotated[
    str,
    typer.Option("--api-key", metavar="KEY", envvar="OVMS_API_KEY", help="API key of the server.", show_envvar=True),
]
_Format = Annotated[
    Output,
    typer.Option(
        "--format",
        metavar=FORMATS,
        help="Format of the output; table: stream the answer, json: one object per answer, csv: one row per answer.",
    ),
]
_Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.001,
        max=86_400,
        metavar="SECONDS",
        help="Longest wait in seconds for the next part of an answer.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)


def chat(
    target: _Target = "",
    *,
    once: _Once = None,
    model: _Model = "",
    system: _System = "",
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    api_key: _ApiKey = "",
    form: _Format = Output.TABLE,
    as_json: JsonOption = False,
    url: Url = "",
    timeout: _Timeout = 600.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
) -> None:
    """Talk to a text model in the terminal: answers are streamed, Ctrl-C stops an answer, /help lists commands.

    From a pipe, each line is a message. Exit codes: 0 at the end of the input, 1 if a message was refused, 2 if the
    server does not answer, 64 if the command line is wrong, 130 if interrupted.
    """
    from ovmstrio.cli.chat_answers import ChatConversation
    from ovmstrio.client.chat_client import ChatClient
    from ovmstrio.core.errors import InvalidRequest

    is_url = "://" in target
    name, address = (model, target) if is_url else (target or model, url)
    if target and (url if is_url else model):
        fail("server and model may be named only once: as the argument, or by --url and --model", EX_USAGE)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    options = {field: value for field, value in given.items() if value is not None}
    with finding_server(address, needs="REST", timeout=timeout, ca=ca, cert=cert, key=key) as server:
        with exit_on_error(EX_USAGE, InvalidRequest):
            client = ChatClient(server.url, api_key=api_key, timeout=timeout, tls=server.tls)
        talk = ChatConversation(client, name or _first(client), options, system)
        went_well = _talk(talk, once, chosen(form, as_json=as_json))
    if not went_well:
        raise typer.Exit(EX_FAILED)


def _first(client: ChatClient) -> str:
    served = client.chat_models()
    if not served:
        fail(f"{client.url} serves no models")
    return served[0]


def _talk(talk: ChatConversation, once: str | None, form: Output) -> bool:
    from ovmstrio.cli.chat_terminal import open_answer_writer, print_answer, run_chat_loop

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a text in another encoding is a message all the same
    if form is Output.TABLE and once is None:
        return run_chat_loop(talk, print_answer)
    printer = _Printer(form)

    def answer(talk: ChatConversation, message: str) -> bool:
        printer.show(talk.ask(message, lambda _: None).facts(talk.model))
        return True

    if once is None:
        return run_chat_loop(talk, answer)
    message = sys.stdin.read() if once == "-" else once
    if not message.strip():
        fail("the message is empty", EX_USAGE)
    if form is not Output.TABLE:
        return answer(talk, message)
    show, end = open_answer_writer()
    try:
        talk.ask(message, show)
    finally:
        end()
    return True


class _Printer:
    """Printer of answers for programs: a JSON object per line, or a CSV header and a row per answer."""

    def __init__(self, form: Output) -> None:
        self._form = form
        self._is_begun = False

    def show(self, facts: dict[str, Any]) -> None:
        if self._form is Output.JSON:
            typer.echo(json.dumps(facts))
        else:
            print_csv([*([] if self._is_begun else [list(facts)]), list(facts.values())])
        self._is_begun = True
