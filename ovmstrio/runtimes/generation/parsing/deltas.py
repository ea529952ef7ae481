"""What parsers of a model's text give: content, reasoning and parts of calls, in the order of the text."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import Final, Protocol

from ovmstrio.core.generation import CallDelta

__all__ = ["Delta", "OutputParser", "ParsedOutput"]

_ID_LETTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9  # templates of Mistral's refuse identifiers of any other length
_BLANKS: Final = " \t\r\n"
_MOST_BLANKS: Final = 64


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of a model's text means; one of the three is there."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class OutputParser(Protocol):
    """Takes a text of a model apart while it comes; what comes out does not depend on how it is cut into pieces."""

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the text must be decoded with its special tokens, which this format is marked by."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Give what is certain with this next part; never raises."""
        ...

    def finish(self) -> list[Delta]:
        """Give what was held back, for the text has ended."""
        ...


class ParsedOutput:
    """Collects what a parser finds; blanks are held until what follows says whether they belong to a text."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._blanks = ""
        self._leading = False
        self._thinks = False
        self.calls = 0

    def text(self, text: str) -> None:
        """Add content."""
        self._thinks = False
        self._add(text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._thinks = True
        self._add(text)

    def part(self) -> None:
        """Begin with something else: blanks before it and after it are nobody's."""
        self._blanks, self._leading = "", True

    def begin_call(self, name: str) -> None:
        """Add a call of the function ``name``."""
        self.part()
        identifier = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        self._deltas.append(Delta(calls=(CallDelta(self.calls, id=identifier, name=name),)))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if text:
            self._deltas.append(Delta(calls=(CallDelta(self.calls - 1, arguments=text),)))

    def end(self) -> None:
        """Give blanks at the end of a text that is content."""
        if self._blanks and not self._thinks:
            self._show(self._blanks)
        self._blanks = ""

    def take(self) -> list[Delta]:
        """Give what has come since the last time, neighbours of a kind joined."""
        found, self._deltas = self._deltas, []
        joined: list[Delta] = []
        for delta in found:
            if joined and (merged := _merged(joined[-1], delta)) is not None:
                joined[-1] = merged
            else:
                joined.append(delta)
        return joined

    def _add(self, text: str) -> None:
        whole = self._blanks + text
        if self._leading:
            whole = whole.lstrip(_BLANKS)
            self._leading = not whole
        kept = max(len(whole.rstrip(_BLANKS)), len(whole) - _MOST_BLANKS)
        if kept:
            self._show(whole[:kept])
        self._blanks = whole[kept:]

    def _show(self, text: str) -> None:
        self._deltas.append(Delta(reasoning=text) if self._thinks else Delta(text=text))


def _merged(first: Delta, second: Delta) -> Delta | None:
    """Give both as one; None where they are of different kinds, or the second begins a call."""
    if first.text and second.text:
        return Delta(text=first.text + second.text)
    if first.reasoning and second.reasoning:
        return Delta(reasoning=first.reasoning + second.reasoning)
    if first.calls and second.calls and not second.calls[0].name:
        before = first.calls[-1]
        grown = CallDelta(before.index, before.id, before.name, before.arguments + second.calls[0].arguments)
        return Delta(calls=(*first.calls[:-1], grown))
    return None
