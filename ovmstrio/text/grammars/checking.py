"""The one check of all kinds of grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.text.grammars.ebnf import check_ebnf
from ovmstrio.text.grammars.patterns import check_pattern
from ovmstrio.text.grammars.refusals import MOST_TEXT, GrammarRefused
from ovmstrio.text.grammars.schemas import check_schema, read_schema

__all__ = ["check_grammar", "check_structural_tag"]

# ----------------------------------------------------------------------
# Structural tags as xgrammar 0.1.31 reads them: texts, schemas and patterns, one behind or beside the other
# ----------------------------------------------------------------------

_MOST_DEPTH: Final = 16
_MOST_PARTS: Final = 1000


def check_structural_tag(text: str) -> None:
    """See that a structural tag, written as JSON, can be imposed.

    Raises:
        GrammarRefused: it cannot.
    """
    if len(text) > MOST_TEXT:
        raise GrammarRefused("", f"the structural tag has {len(text)} letters, where {MOST_TEXT} are the most")
    try:
        tag = json.loads(text)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise GrammarRefused("", f"the structural tag is no JSON: {error}") from error
    if not isinstance(tag, Mapping) or "format" not in tag:
        _refuse("$", 'expected {"type": "structural_tag", "format": {...}}')
    _Tags().visit(tag["format"], "$.format", 0)


class _Tags:
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
        if depth > _MOST_DEPTH or self._parts > _MOST_PARTS:
            _refuse(path, f"the tag is nested more than {_MOST_DEPTH} deep, or has more than {_MOST_PARTS} parts")
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            _refuse(path, f"expected an object whose type is one of {', '.join(self._kinds)}")
        self._kinds[kind](form, path, depth)

    @staticmethod
    def _constant(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        if not _text(form, "value", path):
            _refuse(f"{path}.value", "expected a text that is not empty")

    @staticmethod
    def _schema(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        if "json_schema" not in form:
            _refuse(path, "json_schema is missing")
        _within(f"{path}.json_schema", check_schema, form["json_schema"])

    def _parameters(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping) or schema.get("type") != "object":
            _refuse(f"{path}.json_schema", "expected a schema of the type object")
        self._schema(form, path, depth)

    @staticmethod
    def _pattern(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        check_pattern(_text(form, "pattern", path), f"{path}.pattern")

    @staticmethod
    def _grammar(form: Mapping[str, Any], path: str, depth: int) -> None:
        del depth
        _within(f"{path}.grammar", check_ebnf, _text(form, "grammar", path))

    def _elements(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        elements = _list(form, "elements", path)
        for number, element in enumerate(elements):
            self.visit(element, f"{path}.elements[{number}]", depth + 1)
            if number < len(elements) - 1 and form["type"] == "sequence" and _unlimited(element):
                _refuse(f"{path}.elements[{number}]", "any text has no end here; put it into a tag with an end")
        if form["type"] == "or" and len(set(map(_unlimited, elements))) > 1:
            _refuse(f"{path}.elements", "any text cannot stand beside what has an end; put it into a tag with an end")

    def _tag(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        _text(form, "begin", path)
        if not _text(form, "end", path) and _unlimited(form.get("content")):
            _refuse(f"{path}.end", "any text needs an end that is not empty")
        self.visit(form.get("content"), f"{path}.content", depth + 1)

    def _tags(self, form: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        tags = _list(form, "tags", path)
        for number, tag in enumerate(tags):
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                _refuse(f"{path}.tags[{number}]", "expected an object with begin, content and end")
            self._tag(tag, f"{path}.tags[{number}]", depth)
        return tags

    def _triggered(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        triggers = _list(form, "triggers", path)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            _refuse(f"{path}.triggers", "expected texts that are not empty")
        for number, tag in enumerate(self._tags(form, path, depth)):
            matching = [trigger for trigger in triggers if tag["begin"].startswith(trigger)]
            if len(matching) != 1:
                _refuse(
                    f"{path}.tags[{number}].begin",
                    f"expected it to begin with one trigger, it does with {len(matching)}",
                )
        _flags(form, path)

    def _separated(self, form: Mapping[str, Any], path: str, depth: int) -> None:
        _text(form, "separator", path)
        self._tags(form, path, depth)
        _flags(form, path)


def _flags(form: Mapping[str, Any], path: str) -> None:
    for name in ("at_least_one", "stop_after_first"):
        if not isinstance(form.get(name, False), bool):
            _refuse(f"{path}.{name}", "expected true or false")


def _unlimited(form: Any) -> bool:
    if not isinstance(form, Mapping):
        return False
    kind = form.get("type")
    if kind in {"any_text", "triggered_tags"}:
        return True
    elements = form.get("elements")
    if kind == "sequence" and isinstance(elements, list) and elements:
        return _unlimited(elements[-1])
    return kind == "or" and isinstance(elements, list) and any(map(_unlimited, elements))


def _text(form: Mapping[str, Any], name: str, path: str) -> str:
    found = form.get(name)
    if not isinstance(found, str):
        _refuse(f"{path}.{name}", "expected a text")
    return found


def _list(form: Mapping[str, Any], name: str, path: str) -> list[Any]:
    found = form.get(name)
    if not isinstance(found, list) or not found:
        _refuse(f"{path}.{name}", "expected a list that is not empty")
    return found


def _within(path: str, check: Callable[[Any], None], value: Any) -> None:
    try:
        check(value)
    except GrammarRefused as refused:
        raise refused.of(refused.field, path) from None


def _refuse(path: str, message: str) -> NoReturn:
    raise GrammarRefused(path, message)


# ----------------------------------------------------------------------
# The one check of all kinds of grammars
# ----------------------------------------------------------------------


def check_grammar(grammar: Grammar) -> None:
    """See that the engine can impose a grammar; milliseconds for the largest, in proportion to its length.

    Raises:
        GrammarRefused: it cannot, with the place and the way out.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(read_schema(grammar.text))
    elif grammar.kind is GrammarKind.REGEX:
        check_pattern(grammar.text)
    elif grammar.kind is GrammarKind.EBNF:
        check_ebnf(grammar.text)
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        check_structural_tag(grammar.text)
