"""Calls as JSON objects: ``{"name": ..., "arguments": {...}}``, read as they come."""

from __future__ import annotations

import json
from typing import Final

from ovmstrio.runtimes.generation.parsing.machine import Machine
from ovmstrio.runtimes.generation.parsing.tape import Brackets, Kept, Malformed, Markers, Steps

__all__ = ["JSON_BRACKETS", "JsonCalls"]

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
