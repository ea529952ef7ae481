"""Output formats with JSON tool calls: Hermes, Llama, Phi, Mistral, DeepSeek and a generic one."""

from __future__ import annotations

import json
from typing import ClassVar, Final

from ovmstrio.text.parsing.parser import BoundedText, Brackets, MalformedText, Markers, Steps, StreamingParser

JSON_BRACKETS: Final = Brackets("{[", "}]", ('"',), escapes=True)
_ENDS: Final = frozenset(",]} \t\r\n")
_STRING_END: Final = Markers(('"', "\\"))
_ARGUMENTS: Final = ("arguments", "parameters")
_MAX_NAME: Final = 512
_MAX_VALUE: Final = 1 << 20


class JsonCallParser(StreamingParser):
    """Parses calls of the form ``{"name": ..., "arguments": {...}}``; arguments are emitted as they arrive."""

    def objects(self, *, close: str, named: bool = False) -> Steps[None]:
        """Parse calls in an array after its bracket, and ``close``.

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
        """Parse a call; its arguments are streamed if its name comes first.

        With ``named``, only functions of the request count.

        Raises:
            Malformed: it is not a call.
        """
        tape = self.tape
        yield from tape.expect("{")
        yield from tape.blanks()
        name, held, is_emitted = "", "", False
        while not is_emitted or not (yield from tape.accept("}")):
            key = yield from self._key()
            if key == "name" and not name:
                name = yield from self._name(named=named)
            elif key in _ARGUMENTS and name and not is_emitted:
                yield from self._stream_call(name)
                is_emitted = True
            elif key in _ARGUMENTS and not is_emitted:
                held = yield from self._held_arguments()
            else:
                yield from self._value()
            if name and held and not is_emitted:
                self._emit_call(name, held)
                is_emitted = True
            yield from tape.blanks()
            if (yield from tape.accept(",")):
                yield from tape.blanks()
            elif not is_emitted:
                if not name or named:
                    raise MalformedText
                yield from tape.expect("}")
                self._emit_call(name, "{}")
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
            raise MalformedText
        return name

    def _stream_call(self, name: str) -> Steps[None]:
        """Emit a call with streamed arguments."""
        letter = yield from self.tape.peek()
        if letter == "{":
            self.begin_call(name)
            if (yield from self.tape.balanced(JSON_BRACKETS, self.out.arguments)):
                self.end_call()
            return
        self._emit_call(name, (yield from self._held_arguments()))

    def _emit_call(self, name: str, arguments: str) -> None:
        self.begin_call(name)
        self.out.arguments(arguments)
        self.end_call()

    def _held_arguments(self) -> Steps[str]:
        """Return arguments given as an object, as JSON in a string, or as null."""
        letter = yield from self.tape.peek()
        if letter == '"':
            text = (yield from self._string(_MAX_VALUE)).strip()
            return text or "{}"
        if letter != "{" and not (yield from self.tape.accept("null")):
            raise MalformedText
        return (yield from self._value()) if letter == "{" else "{}"

    def _string(self, limit: int = _MAX_NAME) -> Steps[str]:
        yield from self.tape.expect('"')
        kept = BoundedText(limit)
        while marker := (yield from self.tape.until(_STRING_END, kept)):
            if marker == '"':
                return _decode_string(f'"{kept.text}"')
            kept(marker)
            kept((yield from self.tape.take()))
        raise MalformedText

    def _value(self) -> Steps[str]:
        """Return any value as written."""
        letter = yield from self.tape.peek()
        if letter == '"':
            return json.dumps((yield from self._string(_MAX_VALUE)))
        if letter in {"{", "["}:
            kept = BoundedText(_MAX_VALUE)
            if (yield from self.tape.balanced(JSON_BRACKETS, kept)):
                return kept.text
        return (yield from self._scalar())

    def _scalar(self) -> Steps[str]:
        kept = BoundedText(_MAX_NAME)
        while (letter := (yield from self.tape.peek())) and letter not in _ENDS:
            kept((yield from self.tape.take()))
        if not kept.text:
            raise MalformedText
        return kept.text


def _decode_string(text: str) -> str:
    """Decode a JSON string.

    Raises:
        Malformed: it is invalid or has a lone surrogate.
    """
    try:
        decoded = str(json.loads(text, strict=False))
        decoded.encode()
    except ValueError:
        raise MalformedText from None
    return decoded


class HermesParser(JsonCallParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes 3, Qwen 2.5 and Qwen 3."""

    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    def call(self) -> Steps[None]:
        """Parse one call and its closing tag."""
        yield from self.tape.blanks()
        yield from self.object_call()
        yield from self.tape.blanks()
        yield from self.tape.accept("</tool_call>")


class LlamaParser(JsonCallParser):
    """``<|python_tag|>{"name": ..., "parameters": {...}}; {...}``; small models omit the marker."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|eom_id|>", "<|eot_id|>")

    def bare(self) -> Steps[None]:
        """Parse calls of known functions without a marker."""
        yield from self.tape.blanks()
        yield from self._calls(named=True)

    def call(self) -> Steps[None]:
        """Parse calls separated by semicolons."""
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


class PhiParser(JsonCallParser):
    """``functools[{"name": ..., "arguments": {...}}, ...]``: Phi 4 mini."""

    begins: ClassVar[tuple[str, ...]] = ("functools",)

    def call(self) -> Steps[None]:
        """Parse an array of calls."""
        yield from self.tape.blanks()
        yield from self.tape.expect("[")
        yield from self.objects(close="]")


class MistralParser(JsonCallParser):
    """``[TOOL_CALLS][{...}, ...]``; newer models write ``[TOOL_CALLS]name[ARGS]{...}`` per call."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    dropped: ClassVar[tuple[str, ...]] = ("</s>",)

    def bare(self) -> Steps[None]:
        """Parse an array of calls of known functions without a marker."""
        yield from self.tape.blanks()
        yield from self.tape.expect("[")
        yield from self.objects(close="]", named=True)

    def call(self) -> Steps[None]:
        """Parse an array of calls, or a name and its arguments."""
        yield from self.tape.blanks()
        if (yield from self.tape.accept("[")):
            yield from self.objects(close="]")
            return
        name, before = yield from self.tape.short(_BEFORE_ARGUMENTS)
        if before == "[CALL_ID]":
            yield from self.tape.short(_ARGUMENTS_MARKER)
        name = name.strip()
        if not name or any(letter.isspace() for letter in name):
            raise MalformedText
        yield from self.tape.blanks()
        yield from self._arguments(name, "{" if before == "{" else "")

    def _arguments(self, name: str, begun: str) -> Steps[None]:
        if not begun and (yield from self.tape.peek()) != "{":
            raise MalformedText
        self.begin_call(name)
        self.out.arguments(begun)
        if (yield from self.tape.balanced(JSON_BRACKETS, self.out.arguments, depth=len(begun))):
            self.end_call()


_ARGUMENTS_MARKER: Final = Markers(("[ARGS]",))
_BEFORE_ARGUMENTS: Final = Markers(("[ARGS]", "[CALL_ID]", "{"))
_SEPARATOR: Final = Markers(("<｜tool▁sep｜>",))  # noqa: RUF001 -- the letters of the format
_LINE_END: Final = Markers(("\n",))


class GenericParser(JsonCallParser):
    """``{"tool_calls": [{"name": ..., "arguments": {...}}, ...]}``, for chat templates without tools."""

    begins: ClassVar[tuple[str, ...]] = ("{",)

    def call(self) -> Steps[None]:
        """Parse the object with its calls."""
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


class DeepSeekParser(JsonCallParser):
    """Calls between full-width bars: DeepSeek V3 and R1 with fenced JSON, V3.1 with plain JSON."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>",)  # noqa: RUF001 -- the letters of the format
    dropped: ClassVar[tuple[str, ...]] = (
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001 -- as above
        "<｜tool▁calls▁end｜>",  # noqa: RUF001 -- as above
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 -- as above
    )

    def call(self) -> Steps[None]:
        """Parse a name, its arguments and the closing marker."""
        tape = self.tape
        name, _ = yield from tape.short(_SEPARATOR)
        yield from tape.blanks()
        fenced = (yield from tape.peek()) != "{"
        if fenced:
            name, _ = yield from tape.short(_LINE_END)
            yield from tape.expect("```json")
            yield from tape.blanks()
        if not name.strip() or (yield from tape.peek()) != "{":
            raise MalformedText
        self.begin_call(name.strip())
        if not (yield from tape.balanced(JSON_BRACKETS, self.out.arguments)):
            return
        self.end_call()
        yield from tape.blanks()
        if fenced:
            yield from tape.accept("```")
            yield from tape.blanks()
        yield from tape.accept("<｜tool▁call▁end｜>")  # noqa: RUF001 -- as above
