"""Live display of growing texts on a terminal, with a limited refresh rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.live import Live
from rich.text import Text

from ovmstrio.cli.console import echo, stdout
from ovmstrio.cli.stream_text import TextReader, line_of, safe_for_terminals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.cli.stream_text import Seen
    from ovmstrio.client.api import StreamReply

_REFRESHES_A_SECOND: Final = 12
_FOOTER_LINES: Final = 2


def show_live(replies: Iterator[StreamReply], seen: Seen) -> None:
    """Show the texts one below the other while they grow, and print them at the end."""
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
                seen.add(reply)
                for output in reply.outputs:
                    text = texts.read(output)
                    growing.add(output.name, f"{line_of(output)}\n" if text is None else text)
    finally:
        for text in growing.texts():
            echo(text)


class _Growing:
    """Texts received so far, by output; drawn in the thread of the live display."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._pieces: dict[str, list[str]] = {}

    def add(self, name: str, text: str) -> None:
        """Append to a text."""
        if text:
            self._pieces.setdefault(name, []).append(safe_for_terminals(text))

    def texts(self) -> list[str]:
        """Return the texts, with the names of their outputs if there are several."""
        found = {name: "".join(pieces).rstrip("\n") for name, pieces in list(self._pieces.items())}
        return list(found.values()) if len(found) == 1 else [f"{name}: {text}" for name, text in found.items()]

    def draw(self) -> Text:
        """Draw the end of each text, as far as it fits the terminal, above a line of statistics."""
        texts = self.texts()
        width, height = stdout().size
        room = max(1, (height - _FOOTER_LINES) // max(1, len(texts)))
        footer = Text(self._seen.summary(), style="dim")
        footer.truncate(width, overflow="ellipsis")
        lines = [line for text in texts for line in Text(_end(text, width * height)).wrap(stdout(), width)[-room:]]
        return Text("\n").join([*lines, footer])


def _end(text: str, least: int) -> str:
    """Cut a long text at a position that rarely moves, so that its lines do not rewrap at each refresh."""
    return text[max(0, len(text) // least - 1) * least :]
