"""Checks of all grammar types, and of structural tags as xgrammar 0.1.31 reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.text.grammars.ebnf import check_ebnf
from ovmstrio.text.grammars.errors import MAX_GRAMMAR_CHARACTERS, GrammarRefused
from ovmstrio.text.grammars.patterns import check_pattern
from ovmstrio.text.grammars.schemas import check_schema, read_schema

_MAX_DEPTH: Final = 16
_MAX_PARTS: Final = 1000


def check_structural_tag(text: str) -> None:
    """Check a structural tag, given as JSON.

    Raises:
        GrammarRefused: it is invalid or not supported.
    """
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(
            "", f"the structural tag has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        )
    try:
        tag = json.loads(text)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise GrammarRefused("", f"the structural tag is not valid JSON: {error}") from error
    if not isinstance(tag, Mapping) or "format" not in tag:
        _refuse("$", 'expected {"type": "structural_tag", "format": {...}}')
    _TagChecker().visit(tag["format"], "$.format", 0)


class _TagChecker:
    def __init__(self) -> None:
        self._parts = 0
        self._kinds: Final[Mapping[str, Callable[[Mapping[str, Any], str, int], None]]] = {
            "const_string": self._constant,
            "any_text": lambda *_: None,
            "json_schema": self._schema,
            "qwen_xml_parameter": self._parameters,
            "regex": self._pattern,
            "grammar": self._grammar,
            "sequence": self._elements,
            "or": self._elements,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def visit(self, form: Any, path: str, depth: int) -> None:
        self._parts += 1
        if depth > _MAX_DEPTH or self._parts > _MAX_PARTS:
            _refuse(path, f"the tag is nested more than {_MAX_DEPTH} deep, or has more than {_MAX_PARTS} parts")
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            _refuse(path, f"expected an object whose type is one of {', '.join(self._kinds)}")
        self._kinds[kind](form, path, depth)

    @staticmethod
    def _constant(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        if not _string_field(form, "value", path):
            _refuse(f"{path}.value", "expected a non-empty string")

    @staticmethod
    def _schema(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        if "json_schema" not in form:
            _refuse(path, "json_schema is missing")
        _check_nested(f"{path}.json_schema", check_schema, form["json_schema"])

    def _parameters(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            _refuse(f"{path}.json_schema", "expected a schema of the type object")
        self._schema(form, path, depth)

    @staticmethod
    def _pattern(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        check_pattern(_string_field(form, "pattern", path), f"{path}.pattern")

    @staticmethod
    def _grammar(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        _check_nested(f"{path}.grammar", check_ebnf, _string_field(form, "grammar", path))

    def _elements(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        elements = _list_field(form, "elements", path)
        for number, element in enumerate(elements):
            self.visit(element, f"{path}.elements[{number}]", depth + 1)
            if number < len(elements) - 1 and form["type"] == "sequence" and _is_unbounded(element):
                _refuse(f"{path}.elements[{number}]", "any_text is unbounded here; put it into a tag with an end")
        if form["type"] == "or" and len(set(map(_is_unbounded, elements))) > 1:
            _refuse(
                f"{path}.elements",
                "any_text cannot be combined with bounded alternatives; put it into a tag with an end",
            )

    def _tag(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        _string_field(form, "begin", path)
        if not _string_field(form, "end", path) and _is_unbounded(form.get("content")):
            _refuse(f"{path}.end", "any_text needs a non-empty end")
        self.visit(form.get("content"), f"{path}.content", depth + 1)

    def _tags(self, form: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        tags = _list_field(form, "tags", path)
        for number, tag in enumerate(tags):
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                _refuse(f"{path}.tags[{number}]", "expected an object with begin, content and end")
            self._tag(tag, f"{path}.tags[{number}]", depth)
        return tags

    def _triggered(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        triggers = _list_field(form, "triggers", path)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            _refuse(f"{path}.triggers", "expected non-empty strings")
        for number, tag in enumerate(self._tags(form, path, depth)):
            matching = [trigger for trigger in triggers if tag["begin"].startswith(trigger)]
            if len(matching) != 1:
                _refuse(
                    f"{path}.tags[{number}].begin",
                    f"expected it to begin with exactly one trigger, got {len(matching)}",
                )
        _flags(form, path)

    def _separated(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        _string_field(form, "separator", path)
        self._tags(form, path, depth)
        _flags(form, path)


def _flags(form: Mapping[str, Any], path: str) -> None:
    for name in ("at_least_one", "stop_after_first"):
        if not isinstance(form.get(name, False), bool):
            _refuse(f"{path}.{name}", "expected true or false")


def _is_unbounded(form: Any) -> bool:
    if not isinstance(form, Mapping):
        return False
    kind = form.get("type")
    if kind in {"any_text", "triggered_tags"}:
        return True
    elements = form.get("elements")
    if kind == "sequence" and isinstance(elements, list) and elements:
        return _is_unbounded(elements[-1])
    return kind == "or" and isinstance(elements, list) and any(map(_is_unbounded, elements))


def _string_field(form: Mapping[str, Any], name: str, path: str) -> str:
    found = form.get(name)
    if not isinstance(found, str):
        _refuse(f"{path}.{name}", "expected a string")
    return found


def _list_field(form: Mapping[str, Any], name: str, path: str) -> list[Any]:
    found = form.get(name)
    if not isinstance(found, list) or not found:
        _refuse(f"{path}.{name}", "expected a non-empty list")
    return found


def _check_nested(path: str, check: Callable[[Any], None], value: Any) -> None:
    try:
        check(value)
    except GrammarRefused as refused:
        raise refused.of(refused.field, path) from None


def _refuse(path: str, message: str) -> NoReturn:
    raise GrammarRefused(path, message)


def check_grammar(grammar: Grammar) -> None:
    """Check that the engine supports a grammar; takes milliseconds at most, linear in its length.

    Raises:
        GrammarRefused: it is invalid or not supported.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(read_schema(grammar.text))
    elif grammar.kind is GrammarKind.REGEX:
        check_pattern(grammar.text)
    elif grammar.kind is GrammarKind.EBNF:
        check_ebnf(grammar.text)
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        check_structural_tag(grammar.text)
