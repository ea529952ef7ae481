"""Output formats with a tag per argument (Qwen Coder, MiniCPM, GLM); the tools' schemas give the JSON types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ovmstrio.text.parsing.json_rewriter import JSON, PYTHON, JsonRewriter, rewrite
from ovmstrio.text.parsing.parser import (
    WHITESPACE,
    MalformedText,
    Markers,
    OnText,
    ParserInputs,
    Steps,
    StreamingParser,
)

_MAX_NAME: Final = 256


@dataclass(frozen=True, slots=True)
class TagFormat:
    """The tags of a format; ``name_end`` follows names of functions and parameters.

    ``literals`` is whether a value may be in a CDATA section.
    """

    function: str
    function_end: str
    parameter: str
    parameter_end: str
    name_end: str
    close: str = ""
    trims: bool = True
    literals: bool = True


class TaggedParser(StreamingParser):
    """Parses tagged calls; string arguments are streamed, others are emitted when complete."""

    form: ClassVar[TagFormat]

    def __init__(self, reading: ParserInputs) -> None:
        super().__init__(reading)
        form = self.form
        ends = filter(None, (form.parameter_end, form.parameter, form.function_end, form.close))
        self._name_end: Final = Markers((form.name_end,))
        self._value_ends: Final = Markers((*ends, *_LITERAL[: form.literals]))
        self._outer: Final = Markers(filter(None, (form.function_end, form.close, form.function, *self.ends.all)))

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
        name = yield from self.read_function_name()
        self.begin_call(name)
        yield from tape.blanks()
        if (yield from tape.peek()) == "{":
            is_complete = yield from JsonRewriter(tape, JSON, self.out.arguments, self.ends).value()
        else:
            is_complete = yield from self._parameters(self.schemas.get(name, {}))
        if not is_complete:
            return
        self.end_call()
        yield from tape.blanks()
        if not (yield from tape.accept(form.function_end)) and not (yield from tape.at(self.ends)):
            raise MalformedText
        self.end_call()
        yield from tape.blanks()
        while (yield from tape.accept(form.function_end)) or (yield from tape.accept(_OTHER_FUNCTION_END)):
            self.end_call()
            yield from tape.blanks()

    # Overridden by formats whose names are not in the tags of their values
    def read_function_name(self) -> Steps[str]:
        """Parse the name of a function; raise MalformedText if there is none."""
        return (yield from self._tag_name())

    def read_parameter_name(self) -> Steps[str]:
        """Parse the name of a parameter, up to its value; raise MalformedText if there is none."""
        return (yield from self._tag_name())

    def _tag_name(self) -> Steps[str]:
        """Parse the rest of a tag.

        Raises:
            MalformedText: there is no name.
        """
        text, _ = yield from self.tape.short(self._name_end, _MAX_NAME)
        name = text.strip().strip("\"'")
        if not name or any(letter in "<>\n" for letter in name):
            raise MalformedText
        return name

    def _parameters(self, schema: Mapping[str, Any]) -> Steps[bool]:
        """Emit all parameters; return False if the text ended, which leaves the JSON incomplete."""
        tape, form, properties = self.tape, self.form, _properties(schema, schema)
        names: set[str] = set()
        self.out.arguments("{")
        while True:
            self.end_call()
            yield from tape.blanks()
            while (yield from tape.accept(form.parameter_end)):
                yield from tape.blanks()
            if not (yield from tape.accept(form.parameter)):
                break
            try:
                name = yield from self.read_parameter_name()
            except MalformedText:
                self.out.arguments("}")
                raise
            tape.release()
            self.out.arguments(f"{', ' if names else ''}{_json_string(name)}: ")
            names.add(name)
            if not (yield from self._argument(_types(properties.get(name), schema), properties.keys() - names)):
                return False
        if not (yield from tape.peek()):
            return False
        self.out.arguments("}")
        return True

    def _argument(self, types: frozenset[str], others: AbstractSet[str]) -> Steps[bool]:
        """Emit a value as JSON; return False if the text ended within it, which leaves the JSON incomplete."""
        trims, end = self.form.trims, self.form.parameter_end
        if types == _STRING:
            writer = _JsonStringWriter(self.out.arguments, trims=trims)
            self.out.arguments('"')
            tag = yield from self._tagged_text(writer.add, others)
            if tag:
                writer.end(strips=tag != end)
                self.out.arguments('"')
            return bool(tag)
        kept: list[str] = []
        tag = yield from self._tagged_text(kept.append, others)
        text = "".join(kept) if tag == end else "".join(kept).rstrip()
        self.out.arguments(_to_json(text, types, trims=trims) if tag else _json_string(text)[:-1])
        return bool(tag)

    def _tagged_text(self, give: OnText, others: AbstractSet[str]) -> Steps[str]:
        """Pass on the text of a parameter, which ``others`` may follow; return the tag at its end, if any."""
        tape = self.tape
        while tag := (yield from tape.until(self._value_ends, give, consume=False)):
            if tag == self.form.parameter_end:
                yield from tape.accept(tag)
                return tag
            if tag == _LITERAL[0]:
                yield from tape.accept(tag)
                yield from tape.until(_LITERAL_END, give)
            elif (yield from self._is_missing_end(tag, others)):
                return tag
            else:
                give((yield from tape.take(len(tag))))
        return ""

    def _is_missing_end(self, tag: str, others: AbstractSet[str]) -> Steps[bool]:
        """Return whether a tag follows a value without a closing tag, and is no part of the value."""
        tape, form = self.tape, self.form
        if tag == form.parameter:
            text = yield from tape.peek(len(tag) + _MAX_NAME)
            name = text[len(tag) :].partition(form.name_end)[0].strip("\"'")
            return name in others or (not others and _IS_NAME.fullmatch(name) is not None)
        at = yield from tape.ahead(len(tag))
        text = yield from tape.peek(at + self._outer.longest)
        return len(text) == at or self._outer.is_next(text, at)


_LITERAL: Final = ("<![CDATA[", "]]>")
_LITERAL_END: Final = Markers(_LITERAL[1:])
_IS_NAME: Final = re.compile(r"[\w.-]+")
_OTHER_FUNCTION_END: Final = "</function_invocation>"  # Qwen 3.6


class _JsonStringWriter:
    """Streams text as a JSON string, without a line break at its start and end."""

    def __init__(self, give: OnText, *, trims: bool) -> None:
        self._give: Final = give
        self._trims: Final = trims
        self._has_begun = False
        self._blanks = ""

    def add(self, text: str) -> None:
        if self._trims and not self._has_begun:
            text = text.removeprefix("\n")
        self._has_begun = True
        text = self._blanks + text
        shown = text.rstrip(WHITESPACE)
        self._blanks = text[len(shown) :]
        self._give(_json_string(shown)[1:-1])

    def end(self, *, strips: bool) -> None:
        """End the text; ``strips`` removes all whitespace at its end."""
        if not strips:
            self._give(_json_string(self._blanks.removesuffix("\n") if self._trims else self._blanks)[1:-1])


_STRING: Final = frozenset({"string"})
_WORDS: Final = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _properties(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """Return the properties of a schema, also those of its parts."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {}
    found: dict[str, Any] = {}
    for part in (_referenced(schema, root), *_parts(schema, "allOf", "anyOf", "oneOf")):
        found.update(_properties(part, root, depth + 1))
    own = schema.get("properties")
    return {**found, **own} if isinstance(own, Mapping) else found


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the allowed JSON types of a schema; empty if any type is allowed."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    declared = schema.get("type")
    named = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    rules = [frozenset(name for name in named if name in _ALL_TYPES)]
    rules.append(frozenset().union(*(_TYPES.get(type(value), _STRING) for value in values or () if values)))
    rules += [_types(part, root, depth + 1) for part in (_referenced(schema, root), *_parts(schema, "allOf"))]
    for choice in ("anyOf", "oneOf"):
        choices = [_types(part, root, depth + 1) for part in _parts(schema, choice)]
        rules.append(frozenset().union(*choices) if all(choices) else frozenset())
    if not any(rules):
        implied = {"properties": "object", "additionalProperties": "object", "items": "array", "pattern": "string"}
        return frozenset(kind for key, kind in implied.items() if key in schema)
    found = _ALL_TYPES
    for rule in rules:
        found &= (rule | {"integer"} if "number" in rule else rule) or _ALL_TYPES
    return found


def _referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the schema that ``$ref`` names within the document; None if there is none."""
    path = schema.get("$ref")
    if not isinstance(path, str) or not path.startswith("#"):
        return None
    found: Any = root
    for key in path[1:].strip("/").split("/") if path[1:] else ():
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _parts(schema: Mapping[str, Any], *keys: str) -> list[Any]:
    return [part for key in keys if isinstance(schema.get(key), list) for part in schema[key]]


def _to_json(text: str, types: frozenset[str], *, trims: bool) -> str:
    """Return the JSON of an unquoted value: the type it looks like, if the schema allows that, else a string."""
    bare = text.strip()
    kind = _WORDS.get(bare.lower())
    if kind is not None and (not types or kind in types):
        return "null" if kind == "null" else bare.lower()
    try:
        value = json.loads(bare, parse_constant=_refuse)
        looks = _TYPES[type(value)]
    except (ValueError, RecursionError):
        value, looks = None, _STRING
    if looks != _STRING and (not types or looks & types):
        return bare
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return str(int(value))
    if bare[:1] in {"{", "["} and types & {"object", "array"}:
        shown = rewrite(bare, PYTHON) or (None if "string" in types else rewrite(bare, JSON))
        if shown is not None:
            return shown
    return _json_string(text.removeprefix("\n").removesuffix("\n") if trims else text)


_MAX_DEPTH: Final = 16
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


_ALL_TYPES: Final = frozenset().union(*_TYPES.values())


class QwenCoderParser(TaggedParser):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen 3 Coder."""

    form: ClassVar[TagFormat] = TagFormat(
        "<function=", "</function>", "<parameter=", "</parameter>", ">", close="</tool_call>"
    )
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    closes: ClassVar[tuple[str, ...]] = ("</tool_call>",)


class MiniCpmParser(TaggedParser):
    """``<function name="name"><param name="key">value</param></function>``: MiniCPM 5."""

    special: ClassVar[bool] = True
    form: ClassVar[TagFormat] = TagFormat("<function name=", "</function>", "<param name=", "</param>", ">")
    begins: ClassVar[tuple[str, ...]] = ("<function name=",)
    closes: ClassVar[tuple[str, ...]] = ("</function>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|im_end|>", "</s>")


class GlmParser(TaggedParser):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM 4.5 and later."""

    special: ClassVar[bool] = True
    form: ClassVar[TagFormat] = TagFormat(
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>", "</arg_key>", trims=False, literals=False
    )
    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    closes: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    dropped: ClassVar[tuple[str, ...]] = ("<|user|>", "<|observation|>", "<|endoftext|>")

    def read_function_name(self) -> Steps[str]:
        """Parse the name before the first parameter."""
        tape = self.tape
        yield from tape.blanks()
        name = self.function_name((yield from tape.take(len((yield from tape.run(_GLM_NAME_END, _MAX_NAME))))))
        yield from tape.blanks()
        if not name or not ((yield from tape.peek()) == "{" or (yield from tape.at(_GLM_AFTER_NAME))):
            raise MalformedText
        return name

    def read_parameter_name(self) -> Steps[str]:
        """Parse the name and the tag before the value."""
        name = yield from self._tag_name()
        yield from self.tape.blanks()
        yield from self.tape.expect("<arg_value>")
        return name


_GLM_NAME_END: Final = re.compile(r"[^\w.:/-]")
_GLM_AFTER_NAME: Final = Markers(("<arg_key>", "</tool_call>"))
