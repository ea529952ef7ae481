"""Formats whose texts are messages, each with a header that says whom it is for."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ovmstrio.text.parsing.parser import Machine, Malformed, Markers, Steps
from ovmstrio.text.parsing.tagged_formats import TagForm, Tagged

__all__ = ["Harmony", "Onyx"]

_MESSAGE: Final = Markers(("<|message|>",))
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_HARMONY_ENDS: Final = Markers(("<|end|>", "<|return|>", "<|call|>", "<|start|>"))


class Harmony(Machine):
    """Messages on channels, of gpt-oss: ``analysis`` is reasoning, ``final`` content, to a function it is a call."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|start|>", "<|channel|>")
    dropped: ClassVar[tuple[str, ...]] = ("<|end|>", "<|return|>", "<|call|>")

    def call(self) -> Steps[None]:
        """Read messages, one behind the other."""
        header = self.marker
        while header:
            text, _ = yield from self.tape.short(_MESSAGE)
            self.tape.release()
            end = yield from self._message(header + text)
            self.out.part()
            self.tape.hold()
            header = end if end == "<|start|>" else ""

    def _message(self, header: str) -> Steps[str]:
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            return (yield from self._function(recipient[1].removeprefix("functions.")))
        channel = _CHANNEL.search(header)
        self.out.part()
        give = self.out.reasoning if channel is not None and channel[1] == "analysis" else self.out.text
        return (yield from self.tape.until(_HARMONY_ENDS, give))

    def _function(self, name: str) -> Steps[str]:
        self.begin_call(name)
        first = yield from self.tape.peek()
        end = yield from self.tape.until(_HARMONY_ENDS, self.out.arguments)
        if end and first == "<":
            self.out.arguments("{}")
        return end


class Onyx(Tagged):
    """Messages to the user, to itself, which are reasoning, and to functions, with tags for their arguments."""

    special: ClassVar[bool] = True
    form: ClassVar[TagForm] = TagForm(
        '<atem:invoke name="',
        "</atem:invoke>",
        '<atem:parameter name="',
        "</atem:parameter>",
        '">',
        close="</atem:function_calls>",
        trims=False,
    )
    begins: ClassVar[tuple[str, ...]] = ("<atem:function_calls>", "<|start|>")
    dropped: ClassVar[tuple[str, ...]] = ("<|eom|>", "<|eot|>")

    def bare(self) -> Steps[None]:
        """Read the header of the first message, whose begin is the prompt's end."""
        yield from self.tape.blanks()
        if (yield from self.tape.accept("<|message|>")):
            self.out.part()
            return
        yield from self.tape.expect("to=")
        yield from self._message("to=")

    def call(self) -> Steps[None]:
        """Read calls, or the header of a message."""
        if self.marker == "<|start|>":
            yield from self._message("")
        else:
            yield from super().call()

    def _message(self, begun: str) -> Steps[None]:
        text, _ = yield from self.tape.short(_MESSAGE)
        recipient = _RECIPIENT.search(begun + text)
        if begun and recipient is None:
            raise Malformed
        self.tape.release()
        self.out.part()
        if recipient is not None and recipient[1] == "self":
            yield from self.tape.until(_ONYX_ENDS, self.out.reasoning)
            self.out.part()


_ONYX_ENDS: Final = Markers(("<|eom|>", "<|eot|>"))
