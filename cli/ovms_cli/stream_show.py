"""How ``ovms stream`` shows replies: growing text on a terminal, plain text in a pipe, lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer

from ovms_cli.console import stderr, stdout
from ovmstrio.client.wire_tensors import from_raw
from ovmstrio.datatypes import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ovmstrio.client.streaming import StreamOutput, StreamReply

__all__ = ["show", "text_of"]

_TEXT_TYPES: Final = frozenset({"UINT8", "BYTES", "JSON"})
_REFRESHES_A_SECOND: Final = 12


def show(replies: Iterator[StreamReply], *, as_json: bool, verbose: bool) -> bool:
    """Show replies as they come; True if one of them told of a problem.

    Whatever ends this early closes the stream, which cancels it on the server.

    Raises:
        ServerError: why the stream failed; what came before it has been shown.
    """
    seen = _Seen()
    with closing(replies):  # type: ignore[type-var]
        try:
            if as_json:
                _print_json(replies, seen)
            elif verbose:
                _print_lines(replies, seen)
            elif stdout().is_terminal:
                _show_live(replies, seen)
            else:
                _print_text(replies, seen)
        finally:
            if verbose:
                stderr().print(seen.summary(), highlight=False, style="dim")
    return seen.problems > 0


@dataclass(slots=True)
class _Seen:
    """What has come so far."""

    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    outputs: int = 0
    problems: int = 0

    def note(self, reply: StreamReply) -> None:
        """Count a reply, and tell of a problem."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.outputs += len(reply.outputs)
        if reply.error:
            self.problems += 1
            stderr().print(f"error: {reply.error}", style="red", highlight=False, markup=False)

    def summary(self) -> str:
        """Say how long the first output took, and how fast the others came."""
        if not self.outputs:
            return "no output"
        seconds = self.last - self.first
        rate = f"{(self.outputs - 1) / seconds:.1f} outputs/s" if seconds > 0 else "one moment"
        return f"first output after {(self.first - self.started) * 1e3:.1f} ms, {self.outputs} outputs, {rate}"


def text_of(output: StreamOutput) -> str | None:
    """Give an output as text, None if it is none."""
    if isinstance(output.data, str):
        return output.data
    if output.datatype in BY_NAME and output.datatype not in _TEXT_TYPES:
        return None
    try:
        text = bytes(output.data).decode() if isinstance(output.data, bytes) else None
    except UnicodeDecodeError:
        return None
    return text if text is None or all(each.isprintable() or each.isspace() for each in text) else None


def _values(output: StreamOutput) -> Any:
    """Give an output that is no text as something that JSON has."""
    if not isinstance(output.data, bytes):
        return output.data
    if output.datatype not in BY_NAME or output.datatype == "BYTES":
        return list(output.data)
    array = from_raw(output.data, output.datatype, output.shape)
    return array.tolist() if array.dtype.kind in "biuf" else [str(each) for each in array.flat]


def _line_of(output: StreamOutput) -> str:
    text = text_of(output)
    if text is not None:
        return text
    values = np.array(_values(output))
    shown = ", ".join(f"{each:.6g}" if values.dtype.kind == "f" else str(each) for each in values.flat[:8])
    more = ", ..." if values.size > 8 else ""  # noqa: PLR2004 - as many as shown
    return f"{output.datatype} {list(output.shape)} {shown}{more}"


def _print_json(replies: Iterator[StreamReply], seen: _Seen) -> None:
    for reply in replies:
        seen.note(reply)
        document: dict[str, Any] = {}
        if reply.timestamp is not None:
            document["timestamp"] = reply.timestamp
        if reply.error:
            document["error"] = reply.error
        for output in reply.outputs:
            text = text_of(output)
            document.setdefault("outputs", {})[output.name] = _values(output) if text is None else text
        typer.echo(json.dumps(document))


def _print_lines(replies: Iterator[StreamReply], seen: _Seen) -> None:
    for reply in replies:
        seen.note(reply)
        for output in reply.outputs:
            typer.echo(f"{reply.timestamp}  {output.name}  {_line_of(output)}")


def _print_text(replies: Iterator[StreamReply], seen: _Seen) -> None:
    """Print texts as they come, one after the other, and everything else on lines of its own."""
    at_start = True
    for reply in replies:
        seen.note(reply)
        for output in reply.outputs:
            text = text_of(output)
            if text is None:
                typer.echo(("" if at_start else "\n") + f"{output.name}: {_line_of(output)}")
                at_start = True
            elif text:
                sys.stdout.write(text)
                sys.stdout.flush()
                at_start = text.endswith("\n")
    if not at_start:
        typer.echo()


def _show_live(replies: Iterator[StreamReply], seen: _Seen) -> None:
    """Show the texts grow, one below the other, and leave them standing at the end."""
    from rich.live import Live

    texts: dict[str, list[str]] = {}
    try:
        with Live(console=stdout(), refresh_per_second=_REFRESHES_A_SECOND, transient=True) as live:
            for reply in replies:
                seen.note(reply)
                for output in reply.outputs:
                    texts.setdefault(output.name, []).append(_piece(output))
                live.update(_tail(texts, seen))
    finally:
        _leave(texts)


def _piece(output: StreamOutput) -> str:
    text = text_of(output)
    return f"{_line_of(output)}\n" if text is None else text


def _named(texts: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Give the texts with their names, which one text alone does not need."""
    filled = {name: "".join(pieces) for name, pieces in texts.items() if any(pieces)}
    return [("" if len(filled) == 1 else f"{name}: ", text) for name, text in filled.items()]


def _tail(texts: dict[str, list[str]], seen: _Seen) -> RenderableType:
    """Draw as much of the end of the texts as the terminal has room for, above a line of figures."""
    from rich.text import Text

    console = stdout()
    body = Text("\n".join(name + text for name, text in _named(texts)))
    lines = body.wrap(console, console.width)[-max(1, console.height - 2) :]
    return Text("\n").join([*lines, Text(seen.summary(), style="dim")])


def _leave(texts: dict[str, list[str]]) -> None:
    for name, text in _named(texts):
        stdout().print(name + text.rstrip("\n"), highlight=False, markup=False, soft_wrap=True)
