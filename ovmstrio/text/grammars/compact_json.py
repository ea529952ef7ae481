"""Conversion of JSON schemas to grammars of single-line JSON.

xgrammar's rules for a schema allow any amount of whitespace between tokens and any number of digits.  A confused model
then generates whitespace or digits until it runs out of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.text.grammars.schemas import kinds_of, read_json, resolve_reference, with_integer_bounds

# ----------------------------------------------------------------------
# Number ranges
# ----------------------------------------------------------------------

_MAX_NUMBER: Final = 10**15 - 1
"""At most 15 digits, which every JSON reader reads exactly; unbounded digits might never end."""

INTEGER: Final = '"-"? ("0" | [1-9] [0-9]{0,14})'
NUMBER: Final = f'{INTEGER} ("." [0-9]{{1,15}})? ([eE] [+-]? [0-9]{{1,2}})?'
_FRACTION: Final = '("." [0-9]{1,15})?'
_NO_FRACTION: Final = '("." "0"{1,15})?'
_SOME_FRACTION: Final = '"." [0-9]{0,14} [1-9]'


def integer_range_rule(minimum: int | None, maximum: int | None) -> str:
    """Return the rule for integers from ``minimum`` to ``maximum``; None means unbounded."""
    low, high = _within(minimum, -_MAX_NUMBER, maximum), _within(maximum, _MAX_NUMBER, minimum)
    if (low, high) == (-_MAX_NUMBER, _MAX_NUMBER):
        return INTEGER
    parts = []
    if low < 0:
        parts.append(f'"-" ({_numerals(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_numerals(max(low, 0), high))
    return " | ".join(parts)


def number_range_rule(minimum: int | None, maximum: int | None, *, above: bool = False, below: bool = False) -> str:
    """Return the rule for numbers from ``minimum`` to ``maximum``, exclusive with ``above`` or ``below``."""
    low, high = _within(minimum, -_MAX_NUMBER, maximum), _within(maximum, _MAX_NUMBER, minimum)
    parts = []
    if low < 0:
        # Without its sign, a number above a negative bound is below it.
        end = max(0, -high)
        parts.append(f'"-" ({_positive(end, -low, above=end == 0 or (below and -high == end), below=above)})')
    if high > 0 or (high == 0 and not below):
        start = max(low, 0)
        parts.append(_positive(start, high, above=above and low == start, below=below))
    return " | ".join(parts)


def integral_bound(value: Any) -> int | None:
    """Return a bound as integer, or None if it is not integral."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return int(value) if is_whole else None


def _within(bound: int | None, usual: int, other: int | None) -> int:
    if bound is not None:
        return bound
    return usual if other is None else (min(usual, other) if usual < 0 else max(usual, other))


def _positive(low: int, high: int, *, above: bool, below: bool) -> str:
    """Return the rule for numbers from ``low`` (at least 0) to ``high``."""
    parts = []
    if low < high:
        # Integer parts from `low` on have any fraction; an excluded `low` needs a nonzero one.
        first = low + 1 if above else low
        if above:
            parts.append(f'"{low}" {_SOME_FRACTION}')
        if first < high:
            parts.append(f"({_numerals(first, high - 1)}) {_FRACTION}")
    if not below and not (above and low == high):
        parts.append(f'"{high}" {_NO_FRACTION}')
    return " | ".join(parts)


def _numerals(low: int, high: int) -> str:
    """Return the rule for integers from ``low`` (at least 0) to ``high``."""
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts += _same_length(str(low), str(last))
        low = last + 1
    return " | ".join(parts)


def _same_length(low: str, high: str) -> list[str]:
    """Return the rules for integers between two of equal length."""
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
# Schema rules
# ----------------------------------------------------------------------


# xgrammar keeps one token mask per state of a rule. A token that reaches beyond the end of the rule is matched at each
# step instead, so a rule that ends after one character costs a walk through the vocabulary per token. Rules of strings
# therefore end with the string: each names its successor, and the closing quote belongs to the last one.


def _letter_then(after: str) -> str:
    """Return the rule for one character of a string, followed by the rule ``after``."""
    return rf'[^"\\\x00-\x1f] {after} | "\\" ["\\/bfnrt] {after} | "\\u" code {after}'


_VALUE_RULES: Final[Mapping[str, str]] = {
    "value": "string | object | array | number | word",
    "object": r'"{" (string colon value (comma string colon value)*)? "}"',
    "array": r'"[" (value (comma value)*)? "]"',
    "word": r'"true" | "false" | "null"',
    "number": NUMBER,
    "integer": INTEGER,
    "string": r'"\"" letters',
    "letters": r'"\""' + f" | {_letter_then('letters')}",
    # Excludes lone surrogates.
    "code": "[0-9a-cA-CefEF] hex hex hex | [dD] [0-7] hex hex "
    r'| [dD] [89abAB] hex hex "\\u" [dD] [c-fC-F] hex hex',
    "hex": "[0-9a-fA-F]",
    "comma": '"," " "?',
    "colon": '":" " "?',
}
"""Rules for arbitrary values, by name."""
_VALUE_RULE_USES: Final[Mapping[str, tuple[str, ...]]] = {
    "value": ("string", "object", "array", "number", "word"),
    "object": ("string", "colon", "comma", "value"),
    "array": ("value", "comma"),
    "string": ("letters",),
    "letters": ("code",),
    "code": ("hex",),
}
_UNSUPPORTED_KEYWORDS: Final = frozenset(
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
"""Keywords that are left to xgrammar's rules."""
_MAX_RULES: Final = 1500
_STRING_BLOCK: Final = 128
"""Characters that rules of their own count; more rules take longer to compile, fewer make more tokens cross an end."""
_MAX_LENGTH: Final = 2000
"""Maximum length bound of strings and arrays."""


class _UnsupportedSchema(Exception):
    """The schema has a keyword without rules here."""


def to_compact_json(grammar: Grammar) -> Grammar:
    """Return an equivalent grammar of single-line JSON, or the grammar itself if that is not possible."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return replace(grammar, kind=GrammarKind.EBNF, text=compact_json_rules({"type": "object"}) or "")
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = read_json(grammar.text)
        narrow = with_integer_bounds(schema)
        rules = compact_json_rules(narrow)
        if rules is not None:
            return replace(grammar, kind=GrammarKind.EBNF, text=rules)
        if narrow != schema:
            return replace(grammar, text=json.dumps(narrow))
    return grammar


def compact_json_rules(schema: Any) -> str | None:
    """Return the rules of a checked schema, or None if it is not supported here."""
    try:
        return _RuleWriter(schema).text()
    except _UnsupportedSchema:
        return None


class _RuleWriter:
    """The rules of one schema, in order of use."""

    def __init__(self, root: Any) -> None:
        self._root: Final = root
        self._rules: Final[dict[str, str]] = {}
        self._references: Final[dict[str, str]] = {}

    def text(self) -> str:
        self._rules["root"] = ""
        self._rules["root"] = self._part(self._root)
        return "\n".join(f"{name} ::= {rule}" for name, rule in self._rules.items()) + "\n"

    def _use_value_rule(self, name: str) -> str:
        """Add a rule for arbitrary values."""
        if name not in self._rules:
            self._rules[name] = _VALUE_RULES[name]
            for used in _VALUE_RULE_USES.get(name, ()):
                self._use_value_rule(used)
        return name

    def _add_rule(self, rule: str) -> str:
        if len(self._rules) > _MAX_RULES:
            raise _UnsupportedSchema
        name = f"part{len(self._rules)}"
        self._rules[name] = rule
        return name

    def _part(self, schema: Any) -> str:
        """Return a schema as alternatives."""
        if schema is True:
            return self._use_value_rule("value")
        if not isinstance(schema, Mapping) or not _UNSUPPORTED_KEYWORDS.isdisjoint(schema):
            raise _UnsupportedSchema
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
        """Return a schema as one element."""
        part = self._part(schema)
        return part if part.isalnum() else self._add_rule(part)

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            self._references[reference] = name = self._add_rule("")
            self._rules[name] = self._part(resolve_reference(self._root, reference))
        return self._references[reference]

    def _typed(self, schema: Mapping[str, Any]) -> str:
        return " | ".join(self._of_type(kind, schema) for kind in kinds_of(schema) or [""])

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
                return self._use_value_rule("value")
        raise _UnsupportedSchema

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not least and most is None:
            return self._use_value_rule("string")
        if max(least, most or 0) > _MAX_LENGTH:
            raise _UnsupportedSchema
        after = self._use_value_rule("letters") if most is None else self._letters_up_to(max(most - least, 0))
        blocks, rest = divmod(least, _STRING_BLOCK)
        for _ in range(rest):
            after = self._add_rule(_letter_then(after))
        return " ".join(['"\\""', *[self._letter_chain("block", _STRING_BLOCK)] * blocks, after])

    def _letters_up_to(self, count: int) -> str:
        """Return the rule for at most ``count`` characters and the closing quote."""
        blocks, rest = divmod(count, _STRING_BLOCK)
        rule = self._letter_chain("letters", rest)
        for _ in range(blocks):
            shorter, block = (
                self._letter_chain("letters", _STRING_BLOCK - 1),
                self._letter_chain("block", _STRING_BLOCK),
            )
            rule = self._add_rule(f"{shorter} | {block} {rule}")
        return rule

    def _letter_chain(self, name: str, count: int) -> str:
        """Return the rule for ``count`` characters (``block``), or at most ``count`` and the end (``letters``)."""
        end, prefix = ('""', "") if name == "block" else (r'"\""', r'"\"" | ')
        self._rules.setdefault(f"{name}0", end)
        for number in range(1, count + 1):
            self._rules.setdefault(f"{name}{number}", prefix + _letter_then(f"{name}{number - 1}"))
        self._use_value_rule("code")
        return f"{name}{count}"

    def _number(self, kind: str, schema: Mapping[str, Any]) -> str:
        words = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
        given = {word: integral_bound(schema[word]) for word in words if word in schema}
        if not given:
            return self._use_value_rule(kind)
        if None in given.values() or len(given.keys() & words[:2]) > 1 or len(given.keys() & words[2:]) > 1:
            raise _UnsupportedSchema
        above, below = given.get("exclusiveMinimum"), given.get("exclusiveMaximum")
        if kind == "integer":
            least = given.get("minimum") if above is None else above + 1
            return integer_range_rule(least, given.get("maximum") if below is None else below - 1)
        least = given.get("minimum") if above is None else above
        most = given.get("maximum") if below is None else below
        rule = number_range_rule(least, most, above=above is not None, below=below is not None)
        if not rule:
            raise _UnsupportedSchema
        return rule

    def _array(self, schema: Mapping[str, Any]) -> str:
        prefix = [self._inner(item) for item in schema.get("prefixItems", ())]
        # Without `items`, an array is unrestricted, unless `prefixItems` lists all its items.
        items = schema.get("items", not prefix)
        if items is False:
            if schema.get("minItems", 0) > len(prefix):
                raise _UnsupportedSchema
            return f'"[" {self._joined(prefix)} "]"'
        least, most = max(schema.get("minItems", 0) - len(prefix), 0), schema.get("maxItems")
        if max(least, most or 0) > _MAX_LENGTH:
            raise _UnsupportedSchema
        most = None if most is None else most - len(prefix)
        more = self._more_items(self._inner(items), least, most, is_first=not prefix)
        return f'"[" {self._joined(prefix)} {more} "]"'

    def _joined(self, items: Sequence[str]) -> str:
        return f" {self._use_value_rule('comma')} ".join(items) if items else '""'

    def _more_items(self, item: str, minimum: int, maximum: int | None, *, is_first: bool) -> str:
        if maximum == 0:
            return '""'
        comma = self._use_value_rule("comma")
        if not is_first:
            return f"({comma} {item}){_count(minimum, maximum)}"
        some = f"{item} ({comma} {item}){_count(max(minimum - 1, 0), None if maximum is None else maximum - 1)}"
        return some if minimum else f"({some})?"

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties", {})
        is_open = not schema.keys() & {"properties", "additionalProperties", "required"}
        others = schema.get("additionalProperties", is_open)
        required = schema.get("required", ())
        if is_open:
            return self._use_value_rule("object")
        if not set(required) <= properties.keys():
            raise _UnsupportedSchema
        comma = self._use_value_rule("comma")
        another = "" if others is False else self._pair(None, others)
        # Built backwards: `after` follows a written property, `first` begins the object.
        after = f"({comma} {another})*" if another else '""'
        first = f"({another} {after})?" if another else '""'
        for name, value in reversed(properties.items()):
            pair = self._pair(name, value)
            following = self._add_rule(after)
            after, begun = f"{comma} {pair} {following}", f"{pair} {following}"
            if name not in required:
                after = f"{after} | {following}"
                begun = f"{begun} | {self._add_rule(first)}"
            first = begun
        return f'"{{" ({first}) "}}"'

    def _pair(self, name: str | None, value: Any) -> str:
        key = self._use_value_rule("string") if name is None else _literal(name)
        return f"{key} {self._use_value_rule('colon')} {self._inner(value)}"


def _count(minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return f"{{{minimum},}}" if minimum else "*"
    return f"{{{minimum},{max(minimum, maximum)}}}"


def _literal(value: Any) -> str:
    written = json.dumps(value, ensure_ascii=False)
    return '"{}"'.format(written.replace("\\", "\\\\").replace('"', '\\"'))
