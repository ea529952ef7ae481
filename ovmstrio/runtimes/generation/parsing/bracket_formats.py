"""Formats whose calls look like those of a programming language; a call is given when it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar, Final

from ovmstrio.runtimes.generation.parsing.literals import Literals, Notation
from ovmstrio.runtimes.generation.parsing.machine import Machine
from ovmstrio.runtimes.generation.parsing.tape import Brackets, Kept, Malformed, Markers, Steps

__all__ = ["Gemma", "Liquid"]

_PYTHON: Final = Brackets("([{", ")]}", ("'", '"'), escapes=True)
_PYTHON_VALUES: Final = Notation(("'", '"'), escapes=True, bare=False)
_GEMMA: Final = Brackets("{[", "}]", ('<|"|>',), escapes=False)
_GEMMA_VALUES: Final = Notation(('<|"|>',), escapes=False, bare=True)
_CALL_BEGIN: Final = Markers(("(",))
_MAPPING_BEGIN: Final = Markers(("{",))


class _Whole(Machine):
    """Tells of calls that have been read whole."""

    def tell(self, name: str, read: Callable[[], dict[str, Any]]) -> None:
        """Tell of a call with the arguments that ``read`` gives.

        Raises:
            Malformed: the name is none, or the arguments cannot be read.
        """
        name = name.strip()
        try:
            arguments = json.dumps(read(), ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise Malformed from None
        if not name or not all(letter.isalnum() or letter in "_-.:/" for letter in name):
            raise Malformed
        self.begin_call(name)
        self.out.arguments(arguments)
        self.end_call()


class Liquid(_Whole):
    """``<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>``, of LFM 2 and 2.5."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|im_end|>",)

    def call(self) -> Steps[None]:
        """Read a list of calls, and the closing mark."""
        tape = self.tape
        yield from tape.blanks()
        yield from tape.expect("[")
        while True:
            name, _ = yield from tape.short(_CALL_BEGIN)
            kept = Kept()
            if not (yield from tape.balanced(_PYTHON, kept, depth=1)):
                raise Malformed
            text = kept.text[:-1]
            self.tell(name, Literals(text, _PYTHON_VALUES).keywords)
            yield from tape.blanks()
            if not (yield from tape.accept(",")):
                break
        yield from tape.expect("]")
        yield from tape.blanks()
        yield from tape.accept("<|tool_call_end|>")


class Gemma(_Whole):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:42}<tool_call|>``, of Gemma 4."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    dropped: ClassVar[tuple[str, ...]] = ("<turn|>", "<|tool_response>")

    def call(self) -> Steps[None]:
        """Read calls up to the closing mark."""
        tape = self.tape
        while True:
            yield from tape.blanks()
            yield from tape.expect("call:")
            name, _ = yield from tape.short(_MAPPING_BEGIN)
            kept = Kept()
            if not (yield from tape.balanced(_GEMMA, kept, depth=1)):
                raise Malformed
            self.tell(name, Literals("{" + kept.text, _GEMMA_VALUES).mapping)
            yield from tape.blanks()
            if (yield from tape.accept("<tool_call|>")):
                return
