"""Output of ``ovms stream``: growing text on a terminal, plain text in a pipe, JSON lines or CSV."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import typer

from ovmstrio.cli.console import echo, print_message, stdout
from ovmstrio.cli.stream_live import show_live
from ovmstrio.cli.stream_text import TextReader, line_of, safe_for_terminals, text_of, values_of
from ovmstrio.cli.tables import Output, print_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from ovmstrio.cli.stream_text import Seen
    from ovmstrio.client.api import StreamReply


def show(replies: Generator[StreamReply], seen: Seen, form: Output, *, verbose: bool, live: bool) -> None:
    """Show responses as they arrive; ``live`` redraws growing texts if the terminal supports it.

    An early end, such as a closed output pipe, closes the stream, which cancels it on the server.

    Raises:
        ServerError: the stream failed; the responses before the failure have been shown.
    """
    try:
        with closing(replies):
            _choose(form, verbose=verbose, live=live)(replies, seen)
    finally:
        if verbose:
            print_message(seen.summary())


def _choose(form: Output, *, verbose: bool, live: bool) -> Callable[[Iterator[StreamReply], Seen], None]:
    if form is not Output.TABLE:
        return _print_json if form is Output.JSON else _print_rows
    if verbose:
        return _print_lines
    return show_live if live and stdout().is_terminal and not stdout().is_dumb_terminal else _print_text


def _print_json(replies: Iterator[StreamReply], seen: Seen) -> None:
    for reply in replies:
        seen.add(reply)
        document: dict[str, Any] = {}
        if reply.timestamp is not None:
            document["timestamp"] = reply.timestamp
        if reply.error:
            document["error"] = reply.error
        for output in reply.outputs:
            text = text_of(output)
            document.setdefault("outputs", {})[output.name] = values_of(output) if text is None else text
        typer.echo(json.dumps(document))


def _print_rows(replies: Iterator[StreamReply], seen: Seen) -> None:
    print_csv([("timestamp", "output", "value")])
    texts = TextReader()
    for reply in replies:
        seen.add(reply)
        for output in reply.outputs:
            text = texts.read(output)
            value = json.dumps(values_of(output)) if text is None else text
            print_csv([("" if reply.timestamp is None else reply.timestamp, output.name, value)])


def _print_lines(replies: Iterator[StreamReply], seen: Seen) -> None:
    texts = TextReader()
    for reply in replies:
        seen.add(reply)
        stamp = "-" if reply.timestamp is None else reply.timestamp
        for output in reply.outputs:
            text = texts.read(output)
            echo(f"{stamp}  {output.name}  {line_of(output) if text is None else _escaped(text)}")


def _escaped(text: str) -> str:
    """Keep a text on its line."""
    return safe_for_terminals(text.replace("\n", "\\n"))


def _print_text(replies: Iterator[StreamReply], seen: Seen) -> None:
    """Print texts as they arrive; a change of output, and values that are not text, start a new line."""
    texts, writer = TextReader(), _Writer()
    try:
        for reply in replies:
            seen.add(reply)
            for output in reply.outputs:
                text = texts.read(output)
                if text is None:
                    writer.write_line(f"{output.name}: {line_of(output)}")
                else:
                    writer.write(output.name, text)
    finally:
        writer.end_line()


class _Writer:
    """Unbuffered writer to standard output that tracks the current line and its output."""

    def __init__(self) -> None:
        self._name = ""
        self._in_line = False

    def write(self, name: str, text: str) -> None:
        """Append to the text of an output."""
        if not text:
            return
        if self._name and name != self._name:
            self.end_line()
            text = f"{name}: {text}"
        self._name = name
        self._put(text)

    def write_line(self, text: str) -> None:
        """Write a separate line."""
        self.end_line()
        self._put(f"{text}\n")

    def end_line(self) -> None:
        """End the current line, if there is one."""
        if self._in_line:
            self._put("\n")

    def _put(self, text: str) -> None:
        typer.echo(safe_for_terminals(text) if sys.stdout.isatty() else text, nl=False)
        self._in_line = not text.endswith("\n")
