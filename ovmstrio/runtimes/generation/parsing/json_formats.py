"""Formats whose calls are JSON, and what each of them writes around that."""

from __future__ import annotations

from typing import ClassVar, Final

from ovmstrio.runtimes.generation.parsing.json_calls import JSON_BRACKETS, JsonCalls
from ovmstrio.runtimes.generation.parsing.tape import Malformed, Markers, Steps

__all__ = ["DeepSeek", "Generic", "Hermes", "Llama", "Mistral", "Phi"]


class Hermes(JsonCalls):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, of Hermes 3, Qwen 2.5 and Qwen 3."""

    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def call(self) -> Steps[None]:
        """Read one call, and its closing tag."""
        yield from self.tape.blanks()
        yield from self.object_call()
        yield from self.tape.blanks()
        yield from self.tape.accept("</tool_call>")


class Llama(JsonCalls):
    """``<|python_tag|>{"name": ..., "parameters": {...}}; {...}``, whose marker small models forget."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|eom_id|>", "<|eot_id|>")

    def bare(self) -> Steps[None]:
        """Read calls of functions that the request knows."""
        yield from self.tape.blanks()
        yield from self._calls(named=True)

    def call(self) -> Steps[None]:
        """Read calls up to what is none."""
        yield from self.tape.blanks()
        yield from self._calls(named=False)

    def _calls(self, *, named: bool) -> Steps[None]:
        while True:
            yield from self.object_call(named=named)
            self.end_call()
            yield from self.tape.blanks()
            if not (yield from self.tape.accept(";")):
                return
            yield from self.tape.blanks()


class Phi(JsonCalls):
    """``functools[{"name": ..., "arguments": {...}}, ...]``, of Phi 4 mini."""

    begins: ClassVar[tuple[str, ...]] = ("functools",)

    def call(self) -> Steps[None]:
        """Read an array of calls."""
        yield from self.tape.blanks()
        yield from self.tape.expect("[")
        yield from self.objects(close="]")


class Mistral(JsonCalls):
    """``[TOOL_CALLS][{...}, ...]``, and of newer models ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    dropped: ClassVar[tuple[str, ...]] = ("</s>",)

    def bare(self) -> Steps[None]:
        """Read an array of calls of functions that the request knows."""
        yield from self.tape.blanks()
        yield from self.tape.expect("[")
        yield from self.objects(close="]", named=True)

    def call(self) -> Steps[None]:
        """Read an array of calls, or a name and its arguments."""
        yield from self.tape.blanks()
        if (yield from self.tape.accept("[")):
            yield from self.objects(close="]")
            return
        name, before = yield from self.tape.short(_BEFORE_ARGUMENTS)
        if before == "[CALL_ID]":
            yield from self.tape.short(_ARGUMENTS)
        name = name.strip()
        if not name or any(letter.isspace() for letter in name):
            raise Malformed
        yield from self.tape.blanks()
        yield from self._arguments(name, "{" if before == "{" else "")

    def _arguments(self, name: str, begun: str) -> Steps[None]:
        if not begun and (yield from self.tape.peek()) != "{":
            raise Malformed
        self.begin_call(name)
        self.out.arguments(begun)
        if (yield from self.tape.balanced(JSON_BRACKETS, self.out.arguments, depth=len(begun))):
            self.end_call()


_ARGUMENTS: Final = Markers(("[ARGS]",))
_BEFORE_ARGUMENTS: Final = Markers(("[ARGS]", "[CALL_ID]", "{"))
_SEPARATOR: Final = Markers(("<｜tool▁sep｜>",))  # noqa: RUF001 -- the letters of the format
_LINE_END: Final = Markers(("\n",))


class Generic(JsonCalls):
    """``{"tool_calls": [{"name": ..., "arguments": {...}}, ...]}``, for models whose template knows no tools."""

    begins: ClassVar[tuple[str, ...]] = ("{",)

    def call(self) -> Steps[None]:
        """Read the object with its calls."""
        tape = self.tape
        yield from tape.blanks()
        yield from tape.expect('"tool_calls"')
        yield from tape.blanks()
        yield from tape.expect(":")
        yield from tape.blanks()
        yield from tape.expect("[")
        yield from self.objects(close="]")
        yield from tape.blanks()
        yield from tape.expect("}")


class DeepSeek(JsonCalls):
    """Calls between full-width bars, of DeepSeek V3 and R1 with a block of JSON, of V3.1 with bare JSON."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>",)  # noqa: RUF001 -- the letters of the format
    dropped: ClassVar[tuple[str, ...]] = (
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001 -- as above
        "<｜tool▁calls▁end｜>",  # noqa: RUF001 -- as above
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 -- as above
    )

    def call(self) -> Steps[None]:
        """Read a name and arguments, and the closing mark."""
        tape = self.tape
        name, _ = yield from tape.short(_SEPARATOR)
        yield from tape.blanks()
        fenced = (yield from tape.peek()) != "{"
        if fenced:
            name, _ = yield from tape.short(_LINE_END)
            yield from tape.expect("```json")
            yield from tape.blanks()
        if not name.strip() or (yield from tape.peek()) != "{":
            raise Malformed
        self.begin_call(name.strip())
        if not (yield from tape.balanced(JSON_BRACKETS, self.out.arguments)):
            return
        self.end_call()
        yield from tape.blanks()
        if fenced:
            yield from tape.accept("```")
            yield from tape.blanks()
        yield from tape.accept("<｜tool▁call▁end｜>")  # noqa: RUF001 -- as above
