"""Formats whose calls are JSON, and what each of them writes around that."""

from __future__ import annotations

import json
from typing import ClassVar, Final

from ovmstrio.text.parsing.parser import Brackets, Kept, Machine, Malformed, Markers, Steps

__all__ = ["JSON_BRACKETS", "DeepSeek", "Generic", "Hermes", "JsonCalls", "Llama", "Mistral", "Phi"]

# ----------------------------------------------------------------------
# Calls as JSON objects: ``{"name": ..., "arguments": {...}}``, read as they come
# ----------------------------------------------------------------------

JSON_BRACKETS: Final = Brackets("{[", "}]", ('"',), escapes=True)
_ENDS: Final = frozenset(",]} \t\r\n")
_STRING_END: Final = Markers(('"', "\\"))
_ARGUMENTS: Final = ("arguments", "parameters")
_MOST_OF_A_NAME: Final = 512
_MOST_OF_A_VALUE: Final = 1 << 20


class JsonCalls(Machine):
    """Reads calls that are JSON objects; formats say what stands around them."""

    def objects(self, *, close: str, named: bool = False) -> Steps[None]:
        """Read calls in an array whose bracket has been read, and the ``]`` behind them.

        Raises:
            Malformed: as :meth:`object_call`.
        """
        tape = self.tape
        while True:
            yield from tape.blanks()
            yield from self.object_call(named=named)
            yield from tape.blanks()
            if not (yield from tape.accept(",")):
                yield from tape.expect(close)
                return

    def object_call(self, *, named: bool = False) -> Steps[None]:
        """Read a call, whose arguments are given as they come if its name comes first.

        Args:
            named: only calls of functions that the request knows are any.

        Raises:
            Malformed: it is none.
        """
        tape = self.tape
        yield from tape.expect("{")
        yield from tape.blanks()
        name, held, told = "", "", False
        while not told or not (yield from tape.accept("}")):
            key = yield from self._key()
            if key == "name" and not name:
                name = yield from self._name(named=named)
            elif key in _ARGUMENTS and name and not told:
                yield from self._tell(name)
                told = True
            elif key in _ARGUMENTS and not told:
                held = yield from self._held_arguments()
            else:
                yield from self._value()
            if name and held and not told:
                self._tell_held(name, held)
                told = True
            yield from tape.blanks()
            if (yield from tape.accept(",")):
                yield from tape.blanks()
            elif not told:
                if not name or named:
                    raise Malformed
                yield from tape.expect("}")
                self._tell_held(name, "{}")
                return
        self.end_call()

    def _key(self) -> Steps[str]:
        key = yield from self._string()
        yield from self.tape.blanks()
        yield from self.tape.expect(":")
        yield from self.tape.blanks()
        return key

    def _name(self, *, named: bool) -> Steps[str]:
        name = yield from self._string()
        if not name or (named and name not in self.schemas):
            raise Malformed
        return name

    def _tell(self, name: str) -> Steps[None]:
        """Begin a call and give its arguments as they come."""
        letter = yield from self.tape.peek()
        if letter == "{":
            self.begin_call(name)
            if (yield from self.tape.balanced(JSON_BRACKETS, self.out.arguments)):
                self.end_call()
            return
        self._tell_held(name, (yield from self._held_arguments()))

    def _tell_held(self, name: str, arguments: str) -> None:
        self.begin_call(name)
        self.out.arguments(arguments)
        self.end_call()

    def _held_arguments(self) -> Steps[str]:
        """Give arguments as a text: an object, JSON in a string, or null where there are none."""
        letter = yield from self.tape.peek()
        if letter == '"':
            text = (yield from self._string(_MOST_OF_A_VALUE)).strip()
            return text or "{}"
        if letter != "{" and not (yield from self.tape.accept("null")):
            raise Malformed
        return (yield from self._value()) if letter == "{" else "{}"

    def _string(self, most: int = _MOST_OF_A_NAME) -> Steps[str]:
        """Read a string.

        Raises:
            Malformed: it is none.
        """
        yield from self.tape.expect('"')
        kept = Kept(most)
        while marker := (yield from self.tape.until(_STRING_END, kept)):
            if marker == '"':
                return _decoded(f'"{kept.text}"')
            kept(marker)
            kept((yield from self.tape.take()))
        raise Malformed

    def _value(self) -> Steps[str]:
        """Read any value, as it is written.

        Raises:
            Malformed: it does not end.
        """
        letter = yield from self.tape.peek()
        if letter == '"':
            return json.dumps((yield from self._string(_MOST_OF_A_VALUE)))
        if letter in {"{", "["}:
            kept = Kept(_MOST_OF_A_VALUE)
            if (yield from self.tape.balanced(JSON_BRACKETS, kept)):
                return kept.text
        return (yield from self._scalar())

    def _scalar(self) -> Steps[str]:
        kept = Kept(_MOST_OF_A_NAME)
        while (letter := (yield from self.tape.peek())) and letter not in _ENDS:
            kept((yield from self.tape.take()))
        if not kept.text:
            raise Malformed
        return kept.text


def _decoded(text: str) -> str:
    """Give what a string of JSON says.

    Raises:
        Malformed: it is none, or has half a surrogate pair.
    """
    try:
        decoded = str(json.loads(text, strict=False))
        decoded.encode()
    except ValueError:
        raise Malformed from None
    return decoded


# ----------------------------------------------------------------------
# Formats whose calls are JSON, and what each of them writes around that
# ----------------------------------------------------------------------


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
            yield from self.tape.short(_ARGUMENTS_MARKER)
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


_ARGUMENTS_MARKER: Final = Markers(("[ARGS]",))
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
