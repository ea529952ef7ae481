"""Output formats with calls as in a programming language (LFM, Llama 4, Nemotron, Gemma).

A call is emitted when it is complete.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from ovmstrio.text.parsing.json_formats import JsonCallParser
from ovmstrio.text.parsing.json_rewriter import GEMMA, PYTHON, JsonRewriter, Notation
from ovmstrio.text.parsing.parser import BoundedText, MalformedText, Steps

_NAME_END: Final = re.compile(r"[^\w.:/-]")
_MAX_NAME: Final = 256


class _CompleteCallParser(JsonCallParser):
    """Base of formats that emit complete calls; models also write calls in JSON."""

    notation: ClassVar[Notation]

    def complete_call(self, *, named: bool) -> Steps[None]:
        """Parse a name and arguments in brackets.

        With ``named``, only functions of the request count.

        Raises:
            MalformedText: the name or the arguments are invalid.
        """
        tape = self.tape
        name = self.function_name((yield from tape.take(len((yield from tape.run(_NAME_END, _MAX_NAME))))))
        yield from tape.blanks()
        bracket = yield from tape.take()
        if not name or bracket not in {"(", "{"} or (named and name not in self.schemas):
            raise MalformedText
        kept = BoundedText()
        if not (yield from JsonRewriter(tape, self.notation, kept, self.ends).value(bracket)):
            raise MalformedText
        self.begin_call(name)
        self.out.arguments(kept.text)
        self.end_call()


class LiquidParser(_CompleteCallParser):
    """``<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>``: LFM 2 and 2.5."""

    special: ClassVar[bool] = True
    notation: ClassVar[Notation] = PYTHON
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    closes: ClassVar[tuple[str, ...]] = ("<|tool_call_end|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|im_end|>",)

    def bare(self) -> Steps[None]:
        """Parse calls of known functions without a marker."""
        yield from self._calls(named=True)

    def call(self) -> Steps[None]:
        """Parse calls."""
        yield from self._calls(named=False)

    def _calls(self, *, named: bool) -> Steps[None]:
        tape = self.tape
        yield from tape.blanks()
        yield from tape.accept("[")
        yield from tape.blanks()
        if (yield from tape.peek()) == "{":
            yield from self.objects(named=named)
            return
        while True:
            yield from self.complete_call(named=named)
            yield from tape.blanks()
            if (yield from tape.accept("]")) or (yield from tape.at(self.ends)) or not (yield from tape.peek()):
                return
            yield from tape.accept(",")
            yield from tape.blanks()


class Llama4Parser(LiquidParser):
    """``<|python_start|>[name(key="value"), ...]<|python_end|>``, mostly without the markers: Llama 3.2 and 4."""

    begins: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_tag|>", "[")
    closes: ClassVar[tuple[str, ...]] = ("<|python_end|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|eom|>", "<|eot|>", "<|eom_id|>", "<|eot_id|>")

    def call(self) -> Steps[None]:
        """Parse calls; without the marker, calls of known functions."""
        yield from self._calls(named=self.marker == "[")


class NemotronParser(LiquidParser):
    """``<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>``, or with calls as in Python: Nemotron."""

    begins: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "<toolcall>")
    closes: ClassVar[tuple[str, ...]] = ("</TOOLCALL>", "</toolcall>")
    dropped: ClassVar[tuple[str, ...]] = ("<SPECIAL_12>", "<|eot_id|>", "<|im_end|>", "</s>")


class GemmaParser(_CompleteCallParser):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:42}<tool_call|>``: Gemma 4."""

    special: ClassVar[bool] = True
    notation: ClassVar[Notation] = GEMMA
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call>", "\ncall:")
    closes: ClassVar[tuple[str, ...]] = ("<tool_call|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<turn|>", "<|tool_response>")

    def bare(self) -> Steps[None]:
        """Parse calls of known functions without a marker."""
        yield from self.tape.blanks()
        if (yield from self.tape.peek()) in {"{", "[", "`"}:
            yield from super().bare()
        else:
            yield from self.tape.accept("call:")
            yield from self._calls(named=True)

    def call(self) -> Steps[None]:
        """Parse calls."""
        tape = self.tape
        yield from tape.blanks()
        if self.marker == self.begins[0] and (yield from tape.peek()) in {"{", "["}:
            yield from self.objects()
            return
        is_marked = self.marker == self.begins[0] and (yield from tape.accept("call:"))
        yield from self._calls(named=not is_marked)

    def _calls(self, *, named: bool) -> Steps[None]:
        while True:
            yield from self.complete_call(named=named)
            yield from self.tape.blanks()
            if not (yield from self.tape.accept("call:")):
                return
