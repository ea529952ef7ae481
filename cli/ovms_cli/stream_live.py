"""Texts that grow on a terminal, redrawn a few times a second, however fast they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.live import Live
from rich.text import Text

from ovms_cli.console import echo, stdout
from ovms_cli.stream_text import TextReader, line_of, safe_for_terminals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovms_cli.stream_text import Seen
    from ovmstrio.client.api import StreamReply

_REFRESHES_A_SECOND: Final = 12
_FOOTER_LINES: Final = 2


def show_live(replies: Iterator[StreamReply], seen: Seen) -> None:
    """Show the texts grow, one below the other, and leave them standing at the end."""
    growing, texts = _Growing(seen), TextReader()
    live = Live(
        console=stdout(),
        get_renderable=growing.draw,
        refresh_per_second=_REFRESHES_A_SECOND,
        transient=True,
        vertical_overflow="crop",
    )
    try:
        with live:
            for reply in replies:
                seen.note(reply)
                for output in reply.outputs:
                    text = texts.read(output)
                    growing.add(output.name, f"{line_of(output)}\n" if text is None else text)
    finally:
        for text in growing.texts():
            echo(text)


class _Growing:
    """The texts so far, by the outputs that they came from; drawn in the thread of the live display."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._pieces: dict[str, list[str]] = {}

    def add(self, name: str, text: str) -> None:
        """Let a text grow."""
        if text:
            self._pieces.setdefault(name, []).append(safe_for_terminals(text))

    def texts(self) -> list[str]:
        """Give the texts with their names, which one text alone does not need."""
        found = {name: "".join(pieces).rstrip("\n") for name, pieces in list(self._pieces.items())}
        return list(found.values()) if len(found) == 1 else [f"{name}: {text}" for name, text in found.items()]

    def draw(self) -> Text:
        """Draw as much of the end of each text as the terminal has room for, above a line of figures."""
        texts = self.texts()
        width, height = stdout().size
        room = max(1, (height - _FOOTER_LINES) // max(1, len(texts)))
        footer = Text(self._seen.summary(), style="dim")
        footer.truncate(width, overflow="ellipsis")
        lines = [line for text in texts for line in Text(_end(text, width * height)).wrap(stdout(), width)[-room:]]
        return Text("\n").join([*lines, footer])


def _end(text: str, least: int) -> str:
    """Cut a long text at a place that stays where it is for a while, so that its lines do not flow at each drawing."""
    return text[max(0, len(text) // least - 1) * least :]
