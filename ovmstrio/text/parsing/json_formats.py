"""Output formats with JSON tool calls: Hermes, Granite, Llama, Phi, Mistral, DeepSeek, Kimi and a generic one."""

from __future__ import annotations

import json
import re
from typing import ClassVar, Final

from ovmstrio.text.parsing.json_rewriter import JSON, JsonRewriter, rewrite
from ovmstrio.text.parsing.parser import (
    BoundedText,
    MalformedText,
    Markers,
    OnText,
    ParserInputs,
    Steps,
    StreamingParser,
)

_NAMES: Final = ("name", "function")
_ARGUMENTS: Final = ("arguments", "parameters")
_MEMBERS: Final = frozenset({*_NAMES, *_ARGUMENTS, "type", "id", "index"})
_IS_NAME: Final = re.compile(r"""[^\s"'{}\[\](),<>]+""")
_KEY_END: Final = re.compile(r"\W")
_MAX_NAME: Final = 512
_MAX_VALUE: Final = 1 << 20


class JsonCallParser(StreamingParser):
    """Parses calls of the form ``{"name": ..., "arguments": {...}}``; arguments are emitted as they arrive."""

    def bare(self) -> Steps[None]:
        """Parse calls of known functions without a marker, also in a code block."""
        yield from self.tape.blanks()
        if (yield from self.tape.accept("```")):
            yield from self.tape.accept("json")
        yield from self.objects(named=True)
        yield from self.tape.accept("```")

    def objects(self, *, named: bool = False, begun: bool = False) -> Steps[None]:
        """Parse calls, in an array or not, and all brackets after them; ``begun`` if the first brace is consumed.

        With ``named``, only functions of the request count.

        Raises:
            MalformedText: as :meth:`_object`.
        """
        tape = self.tape
        yield from tape.blanks()
        if not begun and (yield from tape.accept("[")):
            yield from tape.blanks()
        while True:
            yield from self._object(named=named, begun=begun)
            yield from self._rest()
            begun = False
            is_separated = (yield from tape.accept(",")) or (yield from tape.accept(";"))
            yield from tape.blanks()
            if not is_separated and (yield from tape.peek()) != "{":
                return

    def rewriter(self, give: OnText) -> JsonRewriter:
        """Return a rewriter of the JSON that is next."""
        return JsonRewriter(self.tape, JSON, give, self.ends)

    def _object(self, *, named: bool, begun: bool) -> Steps[None]:
        """Parse a call up to its arguments, which are streamed if its name comes first.

        Raises:
            MalformedText: it is not a call.
        """
        tape = self.tape
        if not begun:
            yield from tape.expect("{")
            yield from tape.accept("{")
        yield from tape.blanks()
        for key in ('"tool_calls"', "'tool_calls'"):
            if named and (yield from tape.accept(key)):
                yield from tape.blanks()
                yield from tape.expect(":")
                yield from self.objects()
                return
        found: dict[str, str] = {}
        while not {"name", "arguments"} <= found.keys():
            if (yield from self._member(found, named=named)):
                return
            yield from tape.blanks()
            if (yield from tape.accept(",")):
                yield from tape.blanks()
            elif (yield from tape.peek()) not in {'"', "'"}:
                break
        if "name" not in found or ("arguments" not in found and (named or not (yield from self._is_ended()))):
            raise MalformedText
        self.begin_call(found["name"])
        self.out.arguments(found.get("arguments", "{}"))
        self.end_call()

    def _member(self, found: dict[str, str], *, named: bool) -> Steps[bool]:
        """Parse a member of a call; return whether it was the arguments, and they have been emitted."""
        tape = self.tape
        while (key := (yield from self._key())) in _NAMES and (yield from tape.accept("{")):
            yield from tape.blanks()
        if named and key not in _MEMBERS:
            raise MalformedText
        if key in _NAMES and "name" not in found:
            found["name"] = self.function_name((yield from self._string()))
            if not _IS_NAME.fullmatch(found["name"]) or (named and found["name"] not in self.schemas):
                raise MalformedText
        elif key in _ARGUMENTS and "name" in found and (yield from tape.peek()) == "{":
            self.begin_call(found["name"])
            if (yield from self.rewriter(self.out.arguments).value()):
                self.end_call()
            return True
        elif key in _ARGUMENTS:
            found["arguments"] = yield from self._held_arguments()
        else:
            yield from self._value()
        return False

    def _is_ended(self) -> Steps[bool]:
        """Return whether the object ends here, with its brace or without."""
        return (yield from self.tape.peek()) == "}" or (yield from self.tape.at(self.ends))

    def _rest(self) -> Steps[None]:
        """Consume the members after a call's arguments, and closing brackets, surplus ones as well."""
        while True:
            yield from self.tape.blanks()
            if (yield from self.tape.peek()) in {"}", "]"}:
                yield from self.tape.take()
                self.end_call()
                continue
            try:
                yield from self.tape.expect(",")
                yield from self.tape.blanks()
                if (yield from self.tape.peek()) not in {"}", "]"}:
                    yield from self._key()
                    yield from self._value()
            except MalformedText:
                self.tape.rewind()
                self.end_call()
                return
            self.end_call()

    def _key(self) -> Steps[str]:
        tape = self.tape
        if (yield from tape.peek()) in {'"', "'"}:
            key = yield from self._string(is_key=True)
        else:
            key = yield from tape.take(len((yield from tape.run(_KEY_END, _MAX_NAME))))
        yield from tape.blanks()
        if not (yield from tape.accept(":")) and (not key or (yield from tape.peek()) != "{"):
            yield from tape.expect("=")
        yield from tape.blanks()
        return key

    def _held_arguments(self) -> Steps[str]:
        """Return arguments given as an object, as JSON in a string, or as null."""
        letter = yield from self.tape.peek()
        if letter in {'"', "'"}:
            text = (yield from self._string(_MAX_VALUE)).strip() or "{}"
            return (rewrite(text, JSON) if text[0] == "{" else None) or text
        value = yield from self._value()
        if letter != "{" and value != "null":
            raise MalformedText
        return value if letter == "{" else "{}"

    def _string(self, limit: int = _MAX_NAME, *, is_key: bool = False) -> Steps[str]:
        kept = BoundedText(limit)
        yield from self.rewriter(kept).string(is_key=is_key)
        return _decode_string(kept.text)

    def _value(self) -> Steps[str]:
        """Return any value as JSON.

        Raises:
            MalformedText: there is none, or it is incomplete.
        """
        kept = BoundedText(_MAX_VALUE)
        if (yield from self.tape.peek()) in _NO_VALUE or not (yield from self.rewriter(kept).value()):
            raise MalformedText
        return kept.text


_NO_VALUE: Final = frozenset({"", ",", "]", "}"})


def _decode_string(text: str) -> str:
    """Decode a JSON string.

    Raises:
        MalformedText: it is invalid or has a lone surrogate.
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
    closes: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def call(self) -> Steps[None]:
        """Parse calls."""
        yield from self.objects()


class GraniteParser(HermesParser):
    """``<|tool_call|>[{"name": ..., "arguments": {...}}]`` (Granite 3), or between ``<tool_call>`` tags (Granite 4)."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<tool_call>", "<function_call>")
    closes: ClassVar[tuple[str, ...]] = ("</tool_call>", "</function_call>")
    dropped: ClassVar[tuple[str, ...]] = ("<|end_of_text|>",)


class LlamaParser(JsonCallParser):
    """``<|python_tag|>{"name": ..., "parameters": {...}}; {...}``, or ``<function=name>{...}</function>``.

    Small models omit the marker.
    """

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("<|python_tag|>", "<function=", "{")
    closes: ClassVar[tuple[str, ...]] = ("</function>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|eom_id|>", "<|eot_id|>")

    def call(self) -> Steps[None]:
        """Parse calls; without the marker, calls of known functions."""
        if self.marker != "<function=":
            yield from self.objects(named=self.marker == "{", begun=self.marker == "{")
            return
        name, _ = yield from self.tape.short(_NAME_END)
        yield from self.tape.blanks()
        if name not in self.schemas or (yield from self.tape.peek()) != "{":
            raise MalformedText
        self.begin_call(name)
        if (yield from self.rewriter(self.out.arguments).value()):
            self.end_call()


class PhiParser(JsonCallParser):
    """``functools[{"name": ..., "arguments": {...}}, ...]``, or between ``<|tool_call|>`` tags: Phi 4 mini."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("functools", "<|tool_call|>", "<|tool_calls|>")
    closes: ClassVar[tuple[str, ...]] = ("<|/tool_call|>", "<|/tool_calls|>")
    dropped: ClassVar[tuple[str, ...]] = ("<|end|>", "<|endoftext|>")

    def call(self) -> Steps[None]:
        """Parse calls."""
        yield from self.tape.blanks()
        yield from self.tape.accept("functools")
        yield from self.objects()


class MistralParser(JsonCallParser):
    """``[TOOL_CALLS][{...}, ...]``; newer models write ``[TOOL_CALLS]name[ARGS]{...}`` per call."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    dropped: ClassVar[tuple[str, ...]] = ("</s>",)

    def call(self) -> Steps[None]:
        """Parse JSON calls, or a name and its arguments."""
        yield from self.tape.blanks()
        if (yield from self.tape.peek()) in {"[", "{"}:
            yield from self.objects()
            return
        name, before = yield from self.tape.short(_BEFORE_ARGUMENTS)
        if before == "[CALL_ID]":
            yield from self.tape.short(_ARGUMENTS_MARKER)
        name = name.strip()
        if not name or any(letter.isspace() for letter in name):
            raise MalformedText
        yield from self.tape.blanks()
        opened = "{" if before == "{" else ""
        if not opened and (yield from self.tape.peek()) != "{":
            raise MalformedText
        self.begin_call(name)
        if (yield from self.rewriter(self.out.arguments).value(opened)):
            self.end_call()


_NAME_END: Final = Markers((">",))
_ARGUMENTS_MARKER: Final = Markers(("[ARGS]",))
_BEFORE_ARGUMENTS: Final = Markers(("[ARGS]", "[CALL_ID]", "{"))


class GenericParser(JsonCallParser):
    """``{"tool_calls": [{"name": ..., "arguments": {...}}, ...]}``, for chat templates without tools."""

    begins: ClassVar[tuple[str, ...]] = ("{",)

    def call(self) -> Steps[None]:
        """Parse the object with its calls, or a call of a known function."""
        yield from self.objects(named=True, begun=True)


class DeepSeekParser(JsonCallParser):
    """Calls between full-width bars: DeepSeek V3 and R1 with fenced JSON, V3.1 with plain JSON."""

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = (
        "<｜tool▁call▁begin｜>",  # noqa: RUF001 -- the letters of the format
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001 -- as above
    )
    closes: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁end｜>",)  # noqa: RUF001 -- as above
    dropped: ClassVar[tuple[str, ...]] = (
        "<｜tool▁calls▁begin｜>",  # noqa: RUF001 -- as above
        "<｜tool▁calls▁end｜>",  # noqa: RUF001 -- as above
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 -- as above
    )

    def __init__(self, reading: ParserInputs) -> None:
        super().__init__(reading)
        self._argument_ends: Final = Markers((*self.ends.all, "```"))

    def call(self) -> Steps[None]:
        """Parse a name and its arguments; a type may precede the name, and a code block hold the arguments."""
        tape = self.tape
        yield from tape.blanks()
        if (yield from tape.accept(self.begins[0])):
            yield from tape.blanks()
        name, _ = yield from tape.short(_SEPARATOR)
        yield from tape.blanks()
        if (yield from tape.peek()) not in {"{", "`"}:
            name = (yield from tape.run(_NAME_STOP, _MAX_NAME)).strip()
            yield from tape.take(len(name))
            yield from tape.blanks()
        if (yield from tape.accept("```")):
            yield from tape.accept("json")
            yield from tape.blanks()
        name = name.strip()
        if not name or "<" in name or (yield from tape.peek()) != "{":
            raise MalformedText
        self.begin_call(name)
        if (yield from JsonRewriter(tape, JSON, self.out.arguments, self._argument_ends).value()):
            self.end_call()
            yield from tape.blanks()
            yield from tape.accept("```")


_SEPARATOR: Final = Markers(("<｜tool▁sep｜>",))  # noqa: RUF001 -- the letters of the format
_NAME_STOP: Final = re.compile(r"[\s{`<]")


class KimiParser(JsonCallParser):
    """``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``: Kimi K2.

    The model expects its identifiers again in the next prompt.
    """

    special: ClassVar[bool] = True
    begins: ClassVar[tuple[str, ...]] = (
        "<|tool_call_begin|>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_section_begin|>",
    )
    closes: ClassVar[tuple[str, ...]] = ("<|tool_call_end|>",)
    dropped: ClassVar[tuple[str, ...]] = (
        *begins[1:],
        "<|tool_calls_section_end|>",
        "<|tool_call_section_end|>",
        "<|im_end|>",
    )

    def call(self) -> Steps[None]:
        """Parse an identifier and the arguments."""
        tape = self.tape
        yield from tape.blanks()
        if (yield from tape.accept(self.begins[0])):
            yield from tape.blanks()
        text, _ = yield from tape.short(_KIMI_SEPARATOR)
        identifier = _KIMI_IDENTIFIER.fullmatch(text.strip())
        yield from tape.blanks()
        is_empty = yield from tape.at(self.ends)
        if identifier is None or not (is_empty or (yield from tape.peek()) == "{"):
            raise MalformedText
        self.begin_call(self.function_name(identifier["name"]), identifier[0] if identifier["number"] else "")
        if is_empty:
            self.out.arguments("{}")
            self.end_call()
        elif (yield from self.rewriter(self.out.arguments).value()):
            self.end_call()


_KIMI_SEPARATOR: Final = Markers(("<|tool_call_argument_begin|>",))
_KIMI_IDENTIFIER: Final = re.compile(r"(?:functions\.)?(?P<name>[\w./-]+)(?::(?P<number>\d+))?")
