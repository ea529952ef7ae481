"""Output formats of messages with headers (gpt-oss Harmony, Onyx)."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ovmstrio.text.parsing.parser import MalformedText, Markers, Steps, StreamingParser
from ovmstrio.text.parsing.tagged_formats import TagFormat, TaggedParser

_MESSAGE: Final = Markers(("<|message|>",))
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_HARMONY_ENDS: Final = Markers(("<|end|>", "<|return|>", "<|call|>", "<|start|>"))


class HarmonyParser(StreamingParser):
    """Messages on channels (gpt-oss): ``analysis`` is reasoning, ``final`` content; messages to functions are calls."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|start|>", "<|channel|>")
    dropped: ClassVar[tuple[str, ...]] = ("<|end|>", "<|return|>", "<|call|>")

    def call(self) -> Steps[None]:
        """Parse consecutive messages."""
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


class OnyxParser(TaggedParser):
    """Messages to the user, to the model itself (reasoning), and to functions, with tagged arguments."""

    special: ClassVar[bool] = True
    form: ClassVar[TagFormat] = TagFormat(
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
        """Parse the first message's header, which the prompt has begun."""
        yield from self.tape.blanks()
        if (yield from self.tape.accept("<|message|>")):
            self.out.part()
            return
        yield from self.tape.expect("to=")
        yield from self._message("to=")

    def call(self) -> Steps[None]:
        """Parse calls, or a message header."""
        if self.marker == "<|start|>":
            yield from self._message("")
        else:
            yield from super().call()

    def _message(self, begun: str) -> Steps[None]:
        text, _ = yield from self.tape.short(_MESSAGE)
        recipient = _RECIPIENT.search(begun + text)
        if begun and recipient is None:
            raise MalformedText
        self.tape.release()
        self.out.part()
        if recipient is not None and recipient[1] == "self":
            yield from self.tape.until(_ONYX_ENDS, self.out.reasoning)
            self.out.part()


_ONYX_ENDS: Final = Markers(("<|eom|>", "<|eot|>"))
