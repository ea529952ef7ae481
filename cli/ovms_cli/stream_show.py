"""How ``ovms stream`` shows replies: growing text on a terminal, plain text in a pipe, lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from ovms_cli.console import stderr, stdout
from ovms_cli.problems import count
from ovms_cli.stream_text import TextReader, line_of, safe_for_terminals, text_of, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ovmstrio.client.streaming import StreamReply

__all__ = ["Seen", "show"]


@dataclass(slots=True)
class Seen:
    """What has come so far."""

    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    outputs: int = 0
    problem: str = ""

    def note(self, reply: StreamReply) -> None:
        """Count a reply, and tell of a problem."""
        if reply.outputs:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.outputs += len(reply.outputs)
        if reply.error:
            self.problem = reply.error
            told = safe_for_terminals(reply.error)
            stderr().print(f"error: {told}", style="red", highlight=False, markup=False, soft_wrap=True)

    def summary(self) -> str:
        """Say how long the first output took, and how fast the others came."""
        if not self.outputs:
            return "no output"
        seconds = self.last - self.first
        rate = f", {(self.outputs - 1) / seconds:.1f} outputs/s" if seconds > 0 else ""
        first = (self.first - self.started) * 1e3
        return f"first output after {first:.1f} ms, {count(self.outputs, 'output')}{rate}"


def show(replies: Generator[StreamReply], seen: Seen, *, as_json: bool, verbose: bool, live: bool) -> None:
    """Show replies as they come; ``live`` lets texts be redrawn as they grow, on a terminal that can.

    Whatever ends this early closes the stream, which cancels it on the server; so does whoever reads the text no more.

    Raises:
        ServerError: why the stream failed; what came before it has been shown.
    """
    try:
        with closing(replies):
            _choose(as_json=as_json, verbose=verbose, live=live)(replies, seen)
    except BrokenPipeError:
        # Python would complain of the pipe once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    finally:
        if verbose:
            stderr().print(seen.summary(), highlight=False, style="dim", soft_wrap=True)


def _choose(*, as_json: bool, verbose: bool, live: bool) -> Callable[[Iterator[StreamReply], Seen], None]:
    if as_json:
        return _print_json
    if verbose:
        return _print_lines
    if live and stdout().is_terminal and not stdout().is_dumb_terminal:
        from ovms_cli.stream_live import show_live

        return show_live
    return _print_text


def _print_json(replies: Iterator[StreamReply], seen: Seen) -> None:
    for reply in replies:
        seen.note(reply)
        document: dict[str, Any] = {}
        if reply.timestamp is not None:
            document["timestamp"] = reply.timestamp
        if reply.error:
            document["error"] = reply.error
        for output in reply.outputs:
            text = text_of(output)
            document.setdefault("outputs", {})[output.name] = values_of(output) if text is None else text
        typer.echo(json.dumps(document))


def _print_lines(replies: Iterator[StreamReply], seen: Seen) -> None:
    texts = TextReader()
    for reply in replies:
        seen.note(reply)
        stamp = "-" if reply.timestamp is None else reply.timestamp
        for output in reply.outputs:
            text = texts.read(output)
            typer.echo(f"{stamp}  {output.name}  {line_of(output) if text is None else _escaped(text)}")


def _escaped(text: str) -> str:
    """Keep a text on its line."""
    return safe_for_terminals(text.replace("\n", "\\n"))


def _print_text(replies: Iterator[StreamReply], seen: Seen) -> None:
    """Print texts as they come, one after the other; another output, and what is no text, begins a line."""
    texts, writer = TextReader(), _Writer()
    try:
        for reply in replies:
            seen.note(reply)
            for output in reply.outputs:
                text = texts.read(output)
                if text is None:
                    writer.write_line(f"{output.name}: {line_of(output)}")
                else:
                    writer.write(output.name, text)
    finally:
        writer.end_line()


class _Writer:
    """Writes to standard output at once, and knows whether a line is under way, and which output's."""

    def __init__(self) -> None:
        self._name = ""
        self._in_line = False

    def write(self, name: str, text: str) -> None:
        """Go on with the text of an output."""
        if not text:
            return
        if self._name and name != self._name:
            self.end_line()
            text = f"{name}: {text}"
        self._name = name
        self._put(text)

    def write_line(self, text: str) -> None:
        """Write a line of its own."""
        self.end_line()
        self._put(f"{text}\n")

    def end_line(self) -> None:
        """End the line that is under way, if there is one."""
        if self._in_line:
            self._put("\n")

    def _put(self, text: str) -> None:
        typer.echo(text, nl=False)
        self._in_line = not text.endswith("\n")
