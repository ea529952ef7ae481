"""Schemas as rules of a grammar whose JSON stands on one line.

The library's own rules for a schema take any number of blanks and line ends between the parts of a text, and models
that have lost their way write nothing else until they run out of tokens; so do the digits of a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.text.grammars.schemas import read_schema, resolved, without_wide_bounds

__all__ = ["INTEGER", "NUMBER", "integers", "numbers", "on_one_line", "one_line_rules", "whole"]

# ----------------------------------------------------------------------
# Numbers within bounds, as parts of a grammar's rule
# ----------------------------------------------------------------------

_MOST: Final = 10**15 - 1
"""Numbers have so many digits at most, that every reader of JSON reads them as they are; more would never end."""

INTEGER: Final = '"-"? ("0" | [1-9] [0-9]{0,14})'
NUMBER: Final = f'{INTEGER} ("." [0-9]{{1,15}})? ([eE] [+-]? [0-9]{{1,2}})?'
_FRACTION: Final = '("." [0-9]{1,15})?'
_NO_FRACTION: Final = '("." "0"{1,15})?'
_SOME_FRACTION: Final = '"." [0-9]{0,14} [1-9]'


def integers(least: int | None, most: int | None) -> str:
    """Give the numerals of all whole numbers from ``least`` to ``most``, None for no bound."""
    low, high = _within(least, -_MOST, most), _within(most, _MOST, least)
    if (low, high) == (-_MOST, _MOST):
        return INTEGER
    parts = []
    if low < 0:
        parts.append(f'"-" ({_numerals(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_numerals(max(low, 0), high))
    return " | ".join(parts)


def numbers(least: int | None, most: int | None, *, above: bool = False, below: bool = False) -> str:
    """Give the numerals of all numbers from ``least`` to ``most``, themselves left out by ``above``, ``below``."""
    low, high = _within(least, -_MOST, most), _within(most, _MOST, least)
    parts = []
    if low < 0:
        # What is above a bound below zero is, without its sign, below it.
        end = max(0, -high)
        parts.append(f'"-" ({_positive(end, -low, above=end == 0 or (below and -high == end), below=above)})')
    if high > 0 or (high == 0 and not below):
        start = max(low, 0)
        parts.append(_positive(start, high, above=above and low == start, below=below))
    return " | ".join(parts)


def whole(value: Any) -> int | None:
    """Give a bound that is a whole number; None for another."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return int(value) if is_whole else None


def _within(bound: int | None, usual: int, other: int | None) -> int:
    if bound is not None:
        return bound
    return usual if other is None else (min(usual, other) if usual < 0 else max(usual, other))


def _positive(low: int, high: int, *, above: bool, below: bool) -> str:
    """Give the numerals of numbers from ``low``, at least 0, to ``high``."""
    parts = []
    if low < high:
        # Whole parts from the least on have any fraction, but for the least itself where it is left out.
        first = low + 1 if above else low
        if above:
            parts.append(f'"{low}" {_SOME_FRACTION}')
        if first < high:
            parts.append(f"({_numerals(first, high - 1)}) {_FRACTION}")
    if not below and not (above and low == high):
        parts.append(f'"{high}" {_NO_FRACTION}')
    return " | ".join(parts)


def _numerals(low: int, high: int) -> str:
    """Give the numerals of whole numbers from ``low``, at least 0, to ``high``."""
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts += _same_length(str(low), str(last))
        low = last + 1
    return " | ".join(parts)


def _same_length(low: str, high: str) -> list[str]:
    """Give the numerals of as many digits as both have, from one to the other."""
    if not low:
        return ['""']
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [_digits(low[0], high[0]) + _any_digits(rest)]
    if low[0] == high[0]:
        return [f'"{low[0]}" ({" | ".join(_same_length(low[1:], high[1:]))})']
    first, last = int(low[0]), int(high[0])
    parts = [f'"{first}" ({" | ".join(_same_length(low[1:], "9" * rest))})']
    if first + 1 < last:
        parts.append(_digits(str(first + 1), str(last - 1)) + _any_digits(rest))
    return [*parts, f'"{last}" ({" | ".join(_same_length("0" * rest, high[1:]))})']


def _digits(first: str, last: str) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _any_digits(count: int) -> str:
    return f" [0-9]{{{count}}}" if count else ""


# ----------------------------------------------------------------------
# Schemas as rules of a grammar whose JSON stands on one line
# ----------------------------------------------------------------------

_BESIDE_VALUES: Final[Mapping[str, str]] = {
    "value": "string | object | array | number | word",
    "object": r'"{" (string colon value (comma string colon value)*)? "}"',
    "array": r'"[" (value (comma value)*)? "]"',
    "word": r'"true" | "false" | "null"',
    "number": NUMBER,
    "integer": INTEGER,
    "string": r'"\"" letter* "\""',
    "letter": r'[^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" code)',
    # Half of a pair is no letter.
    "code": "[0-9a-cA-CefEF] hex hex hex | [dD] [0-7] hex hex "
    r'| [dD] [89abAB] hex hex "\\u" [dD] [c-fC-F] hex hex',
    "hex": "[0-9a-fA-F]",
    "comma": '"," " "?',
    "colon": '":" " "?',
}
"""The rules of any value, by their names."""
_USES: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("string", "object", "array", "number", "word"),
    "object": ("string", "colon", "comma", "value"),
    "array": ("value", "comma"),
    "string": ("letter",),
    "letter": ("code",),
    "code": ("hex",),
}
_TOO_MUCH: Final = frozenset(
    {
        "contains",
        "format",
        "maxContains",
        "maxProperties",
        "minContains",
        "minProperties",
        "pattern",
        "patternProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""What is left to the library's own rules."""
_MOST_RULES: Final = 1500
_MOST_LENGTH: Final = 2000
"""Of texts whose length is bounded."""


class _LeftToTheLibrary(Exception):
    """A schema has something that has no rules here."""


def on_one_line(grammar: Grammar) -> Grammar:
    """Give a grammar whose JSON stands on one line in place of one of a schema, if its rules can be written here."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return Grammar(GrammarKind.EBNF, one_line_rules({"type": "object"}) or "")
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = read_schema(grammar.text)
        narrow = without_wide_bounds(schema)
        rules = one_line_rules(narrow)
        if rules is not None:
            return Grammar(GrammarKind.EBNF, rules)
        if narrow != schema:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(narrow))
    return grammar


def one_line_rules(schema: Any) -> str | None:
    """Give the rules of a schema that has passed its check; None if they cannot be written here."""
    try:
        return _Rules(schema).text()
    except _LeftToTheLibrary:
        return None


class _Rules:
    """The rules of one schema, in the order in which they were found to be needed."""

    def __init__(self, root: Any) -> None:
        self._root: Final = root
        self._rules: Final[dict[str, str]] = {}
        self._references: Final[dict[str, str]] = {}

    def text(self) -> str:
        """Write all of them."""
        self._rules["root"] = ""
        self._rules["root"] = self._part(self._root)
        return "\n".join(f"{name} ::= {rule}" for name, rule in self._rules.items()) + "\n"

    def _known(self, name: str) -> str:
        """Use one of the rules for any value."""
        if name not in self._rules:
            self._rules[name] = _BESIDE_VALUES[name]
            for used in _USES.get(name, ()):
                self._known(used)
        return name

    def _named(self, rule: str) -> str:
        """Give a rule a name."""
        if len(self._rules) > _MOST_RULES:
            raise _LeftToTheLibrary
        name = f"part{len(self._rules)}"
        self._rules[name] = rule
        return name

    def _part(self, schema: Any) -> str:
        """Write a schema as alternatives."""
        if schema is True:
            return self._known("value")
        if not isinstance(schema, Mapping) or not _TOO_MUCH.isdisjoint(schema):
            raise _LeftToTheLibrary
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema:
            return _literal(schema["const"])
        if "enum" in schema:
            return " | ".join(map(_literal, schema["enum"]))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return " | ".join(map(self._part, schema[keyword]))
        return self._typed(schema)

    def _inner(self, schema: Any) -> str:
        """Write a schema as one element."""
        part = self._part(schema)
        return part if part.isalnum() else self._named(part)

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            self._references[reference] = name = self._named("")
            self._rules[name] = self._part(resolved(self._root, reference))
        return self._references[reference]

    def _typed(self, schema: Mapping[str, Any]) -> str:
        kinds = schema.get("type") or _implied(schema)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return " | ".join(self._of_type(kind, schema) for kind in kinds)

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._number(kind, schema)
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
            case "":
                return self._known("value")
        raise _LeftToTheLibrary

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not least and most is None:
            return self._known("string")
        if max(least, most or 0) > _MOST_LENGTH:
            raise _LeftToTheLibrary
        count = f"{{{least},}}" if most is None else f"{{{least},{most}}}"
        return rf'"\"" {self._known("letter")}{count} "\""'

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        words = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        given = {word: whole(schema[word]) for word in words if word in schema}
        if not given:
            return self._known(kind)
        if None in given.values() or len(given.keys() & words[:2]) > 1 or len(given.keys() & words[2:]) > 1:
            raise _LeftToTheLibrary
        above, below = given.get("exclusiveMinimum"), given.get("exclusiveMaximum")
        if kind == "integer":
            least = given.get("minimum") if above is None else above + 1
            return integers(least, given.get("maximum") if below is None else below - 1)
        least = given.get("minimum") if above is None else above
        most = given.get("maximum") if below is None else below
        rule = numbers(least, most, above=above is not None, below=below is not None)
        if not rule:
            raise _LeftToTheLibrary
        return rule

    def _array(self, schema: Mapping[str, Any]) -> str:
        prefix = [self._inner(item) for item in schema.get("prefixItems", ())]
        # A list of which nothing is said is any; one whose first items are told has no others.
        items = schema.get("items", not prefix)
        if items is False:
            return f'"[" {self._joined(prefix)} "]"'
        least, most = max(schema.get("minItems", 0) - len(prefix), 0), schema.get("maxItems")
        if max(least, most or 0) > _MOST_LENGTH:
            raise _LeftToTheLibrary
        most = None if most is None else most - len(prefix)
        more = self._more_items(self._inner(items), least, most, is_first=not prefix)
        return f'"[" {self._joined(prefix)} {more} "]"'

    def _joined(self, items: Sequence[str]) -> str:
        return f" {self._known('comma')} ".join(items) if items else '""'

    def _more_items(self, item: str, least: int, most: int | None, *, is_first: bool) -> str:
        if most == 0:
            return '""'
        comma = self._known("comma")
        if not is_first:
            return f"({comma} {item}){_count(least, most)}"
        some = f"{item} ({comma} {item}){_count(max(least - 1, 0), None if most is None else most - 1)}"
        return some if least else f"({some})?"

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        is_open = not schema.keys() & {"properties", "additionalProperties", "required"}
        others = schema.get("additionalProperties", is_open)
        required = schema.get("required", ())
        if is_open:
            return self._known("object")
        if not set(required) <= properties.keys():
            raise _LeftToTheLibrary
        comma = self._known("comma")
        another = "" if others is False else self._pair(None, others)
        # What may follow where something was written already, and where nothing was, from the last property back.
        after = f"({comma} {another})*" if another else '""'
        first = f"({another} {after})?" if another else '""'
        for name, value in reversed(properties.items()):
            pair = self._pair(name, value)
            following = self._named(after)
            after, begun = f"{comma} {pair} {following}", f"{pair} {following}"
            if name not in required:
                after = f"{after} | {following}"
                begun = f"{begun} | {self._named(first)}"
            first = begun
        return f'"{{" ({first}) "}}"'

    def _pair(self, name: str | None, value: Any) -> str:
        key = self._known("string") if name is None else _literal(name)
        return f"{key} {self._known('colon')} {self._inner(value)}"


def _implied(schema: Mapping[str, Any]) -> str:
    if schema.keys() & {"properties", "additionalProperties"}:
        return "object"
    return "array" if schema.keys() & {"items", "prefixItems"} else ""


def _count(least: int, most: int | None) -> str:
    if most is None:
        return f"{{{least},}}" if least else "*"
    return f"{{{least},{max(least, most)}}}"


def _literal(value: Any) -> str:
    written = json.dumps(value, ensure_ascii=False)
    return '"{}"'.format(written.replace("\\", "\\\\").replace('"', '\\"'))
