"""Output formats of messages with headers (gpt-oss Harmony, Onyx)."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ovmstrio.text.parsing.json_rewriter import JSON, JsonRewriter, rewrite
from ovmstrio.text.parsing.parser import MalformedText, Markers, Steps, StreamingParser
from ovmstrio.text.parsing.tagged_formats import TagFormat, TaggedParser

_MESSAGE: Final = Markers(("<|message|>",))
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\W*(analysis|commentary|final)")
_HEADER_PART: Final = re.compile(
    rf"<\|start\|>\s*[\w.]*|{_CHANNEL.pattern}|<\|channel\|>|<\|constrain\|>\s*\w*|{_RECIPIENT.pattern}"
)
_NAME: Final = re.compile(r"[\w.:/-]+")
_MAX_HEADER: Final = 1 << 16
_HARMONY_BEGINS: Final = ("<|start|>", "<|channel|>")
_HARMONY_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE_ENDS: Final = Markers((*_HARMONY_ENDS, *_HARMONY_BEGINS))
_HEADER_ENDS: Final = Markers(("<|message|>", "<|start|>", *_HARMONY_ENDS))


class HarmonyParser(StreamingParser):
    """Messages on channels (gpt-oss): ``analysis`` is reasoning, ``final`` content; messages to functions are calls.

    Messages to other recipients than the user, such as the model itself, are reasoning.
    """

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = _HARMONY_BEGINS
    dropped: ClassVar[tuple[str, ...]] = _HARMONY_ENDS

    def bare(self) -> Steps[None]:
        """Parse messages whose first header the prompt has begun."""
        yield from self.tape.blanks()
        yield from self.tape.expect("to=")
        yield from self._messages("to=")

    def call(self) -> Steps[None]:
        """Parse consecutive messages."""
        yield from self._messages(self.marker)

    def _messages(self, header: str) -> Steps[None]:
        while header:
            text, end = yield from self.tape.short(_HEADER_ENDS, _MAX_HEADER)
            self.tape.release()
            self.out.part()
            if end == "<|message|>":
                end = yield from self._message(header + text)
            else:
                self._message_without_marker(header + text)
            self.out.part()
            self.tape.hold()
            header = end if end in _HARMONY_BEGINS else ""

    def _message(self, header: str) -> Steps[str]:
        """Emit a message; return the marker at its end."""
        name = self._function(header)
        if not name:
            give = self.out.reasoning if self._is_reasoning(header) else self.out.text
            return (yield from self.tape.until(_MESSAGE_ENDS, give))
        self.begin_call(name)
        yield from self.tape.blanks()
        if (yield from self.tape.at(_MESSAGE_ENDS)):
            self.out.arguments("{}")
        if (yield from self.tape.peek()) == "{":
            yield from JsonRewriter(self.tape, JSON, self.out.arguments, self.ends).value()
            return (yield from self.tape.until(_MESSAGE_ENDS, self.out.text))
        return (yield from self.tape.until(_MESSAGE_ENDS, self.out.arguments))

    def _message_without_marker(self, header: str) -> None:
        """Emit the text of a header that no ``<|message|>`` ends."""
        text = _HEADER_PART.sub("", header).strip()
        name = self._function(header)
        if name and "{" in text:
            self.begin_call(name)
            self.out.arguments(rewrite(text[text.index("{") :], JSON) or text)
        elif text and (self._is_reasoning(header) or not _CHANNEL.search(header)):
            self.out.reasoning(text)
        else:
            self.out.text(text)

    def _function(self, header: str) -> str:
        """Return the function that a message is to; empty if its recipient is none."""
        found = _RECIPIENT.findall(header)
        recipient = _NAME.match(found[-1]) if found else None
        if recipient is None:
            return ""
        written = recipient[0].removeprefix("functions.")
        name = self.function_name(written)
        if name not in self.schemas and name.removesuffix("json") in self.schemas:
            return name.removesuffix("json")
        return name if name in self.schemas or written != recipient[0] else ""

    def _is_reasoning(self, header: str) -> bool:
        recipients, channels = _RECIPIENT.findall(header), _CHANNEL.findall(header)
        return (
            channels[-1:] == ["analysis"]
            or (recipients and recipients[-1] != "user")
            or "<|start|>functions." in header
        )


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
    closes: ClassVar[tuple[str, ...]] = ("</atem:function_calls>",)
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
