"""``ovms help``: options of a server by topic, and the help of commands."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ovmstrio.cli.commands import Command, Group, suggest
from ovmstrio.cli.console import EX_USAGE, fail
from ovmstrio.cli.help_text import Entry, lay_out, parameter_entry

_TOPICS = {
    "server": "ports, addresses, configuration files, caches, model control",
    "model": "one model: shape, batching, device, versions, preprocessing",
    "text": "text, embedding, rerank and speech models",
    "sequences": "sequences of stateful models",
    "workers": "worker processes and isolation of Python code",
    "project": "handler projects",
    "limits": "message sizes, queues, timeouts, draining",
    "security": "TLS, keys, tokens, remote administration, CORS",
    "observability": "logs, metrics, traces",
    "compatibility": "options of OVMS that have no effect",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("help")(explain)


def explain(
    ctx: typer.Context,
    topic: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC|COMMAND", help="What to explain. Default: list the topics.")
    ] = None,
) -> None:
    """Explain the options of a server by topic, or a command."""
    match topic or []:
        case []:
            typer.echo(_topics())
        case [name] if name in _TOPICS:
            typer.echo(_options(ctx, name))
        case names:
            _explain_command(ctx, names)


def _topics() -> str:
    rows = [Entry("Options of ovms serve", name, text) for name, text in _TOPICS.items()]
    text = "Explain the options of a server by topic, or a command such as infer."
    return lay_out("ovms help [TOPIC|COMMAND]", text, rows, "ovms serve --help-all shows the options of all topics.")


def _options(ctx: typer.Context, topic: str) -> str:
    from ovmstrio.server.settings import GROUPS

    title = GROUPS[topic]
    serve = _find(ctx, ["serve"])
    params = [each for each in serve.get_params(ctx) if getattr(each, "rich_help_panel", None) == title]
    return lay_out("ovms serve [OPTIONS]", "", list(map(parameter_entry, params)))


def _explain_command(ctx: typer.Context, names: list[str]) -> None:
    command = _find(ctx, names)
    if command is None:
        from ovmstrio.cli.main import COMMANDS

        wrong = " ".join(names)
        listed = f"topics: {', '.join(_TOPICS)}; ovms --help lists the commands"
        fail(f"no topic or command {wrong!r}.{suggest(wrong, [*_TOPICS, *COMMANDS])} {listed}", EX_USAGE)
    with typer.Context(command, info_name=" ".join(["ovms", *names])) as its_context:
        typer.echo(command.get_help(its_context))


def _find(ctx: typer.Context, names: list[str]) -> Any:
    """Return the command of these names, None if there is none."""
    found: Any = ctx.find_root().command
    for name in names:
        found = found.get_command(ctx, name.replace("_", "-")) if isinstance(found, Group) else None
    return found if isinstance(found, Command | Group) else None
