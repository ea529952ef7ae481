"""Output formats with a tag per argument (Qwen Coder, MiniCPM); the tools' schemas give the JSON types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ovmstrio.text.parsing.parser import MalformedText, Markers, OnText, ParserInputs, Steps, StreamingParser


@dataclass(frozen=True, slots=True)
class TagFormat:
    """The tags of a format; ``name_end`` follows names of functions and parameters."""

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    name_end: str
    close: str = ""
    trims: bool = True


class TaggedParser(StreamingParser):
    """Parses tagged calls; string arguments are streamed, others are emitted when complete."""

    form: ClassVar[TagFormat]

    def __init__(self, reading: ParserInputs) -> None:
        super().__init__(reading)
        self._name_end: Final = Markers((self.form.name_end,))
        self._parameter_end: Final = Markers((self.form.parameter_end,))

    def call(self) -> Steps[None]:
        """Parse calls; the marker may be the function tag itself."""
        tape, form = self.tape, self.form
        if self.marker != form.function:
            yield from tape.blanks()
            yield from tape.expect(form.function)
        while True:
            yield from self._function()
            yield from tape.blanks()
            if form.close and (yield from tape.accept(form.close)):
                return
            yield from tape.expect(form.function)

    def _function(self) -> Steps[None]:
        tape, form = self.tape, self.form
        name, _ = yield from tape.short(self._name_end)
        name = name.strip()
        if not name or any(letter in "<>\n" for letter in name):
            raise MalformedText
        self.begin_call(name)
        self.out.arguments("{")
        properties = _properties(self.schemas.get(name, {}))
        separator = ""
        while True:
            self.end_call()
            yield from tape.blanks()
            if not (yield from tape.accept(form.parameter)):
                break
            key, _ = yield from tape.short(self._name_end)
            tape.release()
            self.out.arguments(f"{separator}{_json_string(key)}: ")
            separator = ", "
            if not (yield from self._argument(_types(properties.get(key)))):
                return
        if (yield from tape.accept(form.function_end)):
            self.out.arguments("}")
            self.end_call()
        elif (yield from tape.peek()):
            self.out.arguments("}")
            raise MalformedText

    def _argument(self, types: frozenset[str]) -> Steps[bool]:
        """Emit a value as JSON; return False if the text ended within it, which leaves the JSON incomplete."""
        if types == _STRING:
            text = _JsonStringWriter(self.out.arguments, trims=self.form.trims)
            self.out.arguments('"')
            is_complete = bool((yield from self.tape.until(self._parameter_end, text.add)))
            if is_complete:
                self.out.arguments('"')
            return is_complete
        kept: list[str] = []
        is_complete = bool((yield from self.tape.until(self._parameter_end, kept.append)))
        shown = "".join(kept)
        self.out.arguments(_to_json(shown, types, trims=self.form.trims) if is_complete else _json_string(shown)[:-1])
        return is_complete


class _JsonStringWriter:
    """Streams text as a JSON string, without a line break at its start and end."""

    def __init__(self, give: OnText, *, trims: bool) -> None:
        self._give: Final = give
        self._trims: Final = trims
        self._has_begun = False
        self._line_end = ""

    def add(self, text: str) -> None:
        if self._trims and not self._has_begun:
            text = text.removeprefix("\n")
        self._has_begun = True
        text = self._line_end + text
        self._line_end = "\n" if self._trims and text.endswith("\n") else ""
        self._give(_json_string(text[: len(text) - len(self._line_end)])[1:-1])


_STRING: Final = frozenset({"string"})
_WORDS: Final = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: Any) -> frozenset[str]:
    """Return the allowed JSON types of a schema; empty if any type is allowed."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset({found})
    if isinstance(found, list):
        return frozenset(name for name in found if isinstance(name, str))
    choices = schema.get("anyOf", schema.get("oneOf"))
    parts = [_types(choice) for choice in choices] if isinstance(choices, list) else []
    return frozenset().union(*parts) if all(parts) else frozenset()


def _to_json(text: str, types: frozenset[str], *, trims: bool) -> str:
    """Return the JSON of an unquoted value: the type it looks like, if the schema allows that, else a string."""
    bare = text.strip()
    kind = _WORDS.get(bare.lower())
    if kind is not None and (not types or kind in types):
        return "null" if kind == "null" else bare.lower()
    try:
        looks = _TYPES[type(json.loads(bare, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        looks = _STRING
    if looks != _STRING and (not types or looks & types):
        return bare
    return _json_string(text.removeprefix("\n").removesuffix("\n") if trims else text)


_TYPES: Final[Mapping[type, frozenset[str]]] = {
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
    str: _STRING,
}


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class QwenCoderParser(TaggedParser):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen 3 Coder."""

    form: ClassVar[TagFormat] = TagFormat(
        "<function=", "</function>", "<parameter=", "</parameter>", ">", close="</tool_call>"
    )
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")


class MiniCpmParser(TaggedParser):
    """``<function name="name"><param name="key">value</param></function>``: MiniCPM 5."""

    form: ClassVar[TagFormat] = TagFormat('<function name="', "</function>", '<param name="', "</param>", '">')
    begins: ClassVar[tuple[str, ...]] = ('<function name="',)
