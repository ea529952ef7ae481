"""Check of JSON schemas: their shape, limits, and what the engine does not impose; errors have a path.

The engine judges everything else, such as the syntax of a ``pattern``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from ovmstrio.text.grammars.limits import MAX_GRAMMAR_CHARACTERS, GrammarRefused, check_pattern, check_repetition
from ovmstrio.util.truncation import cut

_MAX_SHOWN_CHARACTERS: Final = 60

# ----------------------------------------------------------------------
# Recursion without end
# ----------------------------------------------------------------------


def check_termination(root: Any) -> None:
    """Check that the schema and each referenced part match a finite text.

    Raises:
        GrammarRefused: a part recurses without end.
    """
    targets = {"#": root, **_targets(root)}
    finite: set[str] = set()
    while grown := {name for name in targets.keys() - finite if _ends(targets[name], finite)}:
        finite |= grown
    for name in targets:
        if name not in finite:
            raise GrammarRefused(
                name.replace("#", "$").replace("/", "."),
                "infinite recursion; make a property optional, or allow null",
            )


def _targets(root: Any) -> dict[str, Any]:
    """Return the targets of all reachable references."""
    found: dict[str, Any] = {}
    left = [root]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in found:
                found[reference] = target = resolve_reference(root, reference)
                left.append(target)
            left.extend(_parts(part))
    return found


def _parts(schema: Mapping[str, Any]) -> list[Any]:
    parts: list[Any] = []
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        value = schema.get(keyword)
        parts += value if isinstance(value, list) else []
    for keyword in ("properties", "patternProperties"):
        value = schema.get(keyword)
        parts += value.values() if isinstance(value, Mapping) else []
    parts += [schema[word] for word in ("items", "additionalProperties", "unevaluatedProperties") if word in schema]
    return parts


def _ends(schema: Any, finite: set[str]) -> bool:
    if not isinstance(schema, Mapping):
        return True
    if "$ref" in schema:
        return schema["$ref"] in finite
    if "const" in schema or "enum" in schema:
        return True
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return any(_ends(choice, finite) for choice in schema[keyword])
    if "allOf" in schema:
        return _ends(schema["allOf"][0], finite)
    kinds = kinds_of(schema)
    if not kinds or any(kind not in {"object", "array"} for kind in kinds):
        return True
    return ("object" in kinds and _object_ends(schema, finite)) or ("array" in kinds and _array_ends(schema, finite))


def _object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    needed = [properties[name] for name in schema.get("required", []) if name in properties]
    return all(_ends(part, finite) for part in needed)


def _array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    prefix = schema.get("prefixItems", [])
    more = max(schema.get("minItems", 0), schema.get("minContains", 0)) > len(prefix)
    needed = [*prefix, schema.get("items", True)] if more else prefix
    return all(_ends(part, finite) for part in needed)


# ----------------------------------------------------------------------
# Shape of any schema, and parts that are not imposed
# ----------------------------------------------------------------------

_TYPES: Final = ("string", "integer", "number", "boolean", "object", "array", "null")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTED_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS: Final = frozenset(
    {
        *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "not", "if", "then", "else"),
    }
)
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    return all(each in _TYPES for each in (value if isinstance(value, list) else [value]))


_SHAPES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(_NAMED_SCHEMAS, (lambda value: isinstance(value, Mapping), "an object")),
    **dict.fromkeys(_LISTED_SCHEMAS, (lambda value: isinstance(value, list) and value != [], "a list of schemas")),
    **dict.fromkeys((*_BOUNDS, "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(_COUNTS, (lambda value: _is_number(value) and value == int(value) >= 0, "an integer from 0")),
    **dict.fromkeys(("pattern", "format", "$ref"), (lambda value: isinstance(value, str), "a string")),
    "enum": (lambda value: isinstance(value, list) and value != [], "a list of values"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        "a list of names",
    ),
    "type": (_is_type, f"one of {', '.join(_TYPES)}"),
}
"""Values of keywords: a test and its description."""


def _schema_parts(root: Any) -> Iterator[tuple[Any, str]]:
    """Yield a schema and all its parts, outer parts first, with their paths."""
    parts: list[tuple[Any, str]] = [(root, "$")]
    for schema, path in parts:
        yield schema, path
        for word, value in schema.items() if isinstance(schema, Mapping) else ():
            if word in _NAMED_SCHEMAS and isinstance(value, Mapping):
                parts += [(part, f"{path}.{word}.{name}") for name, part in value.items()]
            elif (word in _LISTED_SCHEMAS or word == "items") and isinstance(value, list):
                parts += [(part, f"{path}.{word}[{number}]") for number, part in enumerate(value)]
            elif word in _SINGLE_SCHEMAS and value is not None:
                parts.append((value, f"{path}.{word}"))


def check_shape(schema: Any, expected_type: str = "") -> None:
    """Check that a schema is one, of a type if one is expected; it need not be supported, and null counts as absent.

    Raises:
        GrammarRefused: a part has a value of a wrong type.
    """
    for part, path in _schema_parts(schema):
        if not isinstance(part, Mapping | bool):
            _refuse(path, f"expected an object, got {_shown(part)}")
        for word, value in part.items() if isinstance(part, Mapping) else ():
            is_valid, expected = _SHAPES.get(word, (None, ""))
            if is_valid is not None and value is not None and not is_valid(value):
                _refuse(f"{path}.{word}", f"expected {expected}, got {_shown(value)}")
    kinds = schema.get("type") if expected_type else None
    if kinds is not None and expected_type not in (kinds if isinstance(kinds, list) else [kinds]):
        _refuse("$.type", f'expected "{expected_type}", got {_shown(kinds)}')


_NOT_IMPOSED: Final = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"),
    *("$recursiveRef", "contains", "minContains", "maxContains", "uniqueItems", "multipleOf"),
)
_LENGTHS: Final = ("minLength", "maxLength")
_NEIGHBOURS: Final = (*_SHAPES.keys() - {"$defs", "definitions", "format"}, "const", *_SINGLE_SCHEMAS)
"""Keywords that restrict values."""
_IMPOSED_ALONE: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("$ref", "anyOf", "oneOf", "allOf"), _NEIGHBOURS),
    **{word: tuple(set(_NEIGHBOURS) - {"type", "const", "enum"}) for word in ("const", "enum")},
    "patternProperties": ("properties", "required", "propertyNames"),
    "propertyNames": ("properties", "required", "additionalProperties", "unevaluatedProperties"),
    "pattern": _LENGTHS,
    "format": ("pattern", *_LENGTHS),
}
"""Keywords that the engine ignores next to another one; next to ``format`` if it knows the format."""
_FORMATS: Final = frozenset(
    {
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer", "uuid"),
    }
)
_JSON_TYPES: Final[Mapping[str, Any]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def check_imposed(schema: Any) -> None:
    """Check that the engine imposes all parts of a schema, as strict ones promise.

    Raises:
        GrammarRefused: a part is not imposed.
    """
    for part, path in _schema_parts(schema):
        if isinstance(part, Mapping):
            for word in _NOT_IMPOSED:
                if part.get(word) not in (None, False):
                    _refuse(f"{path}.{word}", "the engine does not impose this keyword; remove it")
            _check_neighbours(part, path)
            _check_values(part, path)


def _check_neighbours(schema: Mapping[str, Any], path: str) -> None:
    """Check for keywords that have no effect next to another one."""
    for word, ignored in _IMPOSED_ALONE.items():
        if word not in schema or (word == "format" and schema[word] not in _FORMATS):
            continue
        for other in ignored:
            if other != word and schema.get(other) not in (None, False):
                _refuse(f"{path}.{other}", f"the engine does not impose it next to {word}; remove one of them")
    for name in schema.get("required") or ():
        if name not in (schema.get("properties") or ()):
            _refuse(f"{path}.required", f"{_shown(name)} is not among the properties, so the engine does not impose it")


def _check_values(schema: Mapping[str, Any], path: str) -> None:
    """Check bounds, and types of listed values."""
    for word in _BOUNDS:
        value = schema.get(word)
        if schema.get("type") != "integer" and isinstance(value, float) and not value.is_integer():
            _refuse(f"{path}.{word}", f"the engine imposes integers only, got {_shown(value)}; remove the bound")
    kinds = schema.get("type")
    for value in schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        if kinds and not any(_is_of_type(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])):
            _refuse(f"{path}.type", f"{_shown(value)} is of another type, and the engine does not impose the type")


def _is_of_type(value: Any, kind: str) -> bool:
    return isinstance(value, _JSON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


# ----------------------------------------------------------------------
# Schemas
# ----------------------------------------------------------------------

_MAX_DEPTH: Final = 48
_MAX_PARTS: Final = 4000
_MAX_INTEGER: Final = 10**15
_MAX_ITEMS: Final = 20_000
_MAX_PROPERTIES: Final = 500
_LOWER_BOUNDS: Final = frozenset({"minimum", "exclusiveMinimum"})
_UPPER_BOUNDS: Final = frozenset({"maximum", "exclusiveMaximum"})
_VALUE_KEYWORDS: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords followed by values, not schemas."""
_MAX_COUNTED_LENGTH: Final = 300
"""Up to this bound, compile time grows with the bound of a string's length, by 20 ms each."""
_MAX_LENGTH_SUM: Final = 1500
"""Maximum sum of all length bounds; the batch is blocked while they compile."""
_MAX_OPTIONAL: Final = 300
"""Maximum optional properties; compile time grows with the square of their number per object."""


def read_json(text: str, subject: str = "schema") -> Any:
    """Parse the JSON of a schema or structural tag.

    Raises:
        GrammarRefused: it is not JSON, or too large.
    """
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        error = f"the {subject} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed"
        raise GrammarRefused("", error)
    try:
        text.encode()
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused("", f"the {subject} is not valid JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def check_schema(schema: Any, *, is_strict: bool = False) -> None:
    """Check a schema; a strict one must be imposed completely.

    Raises:
        GrammarRefused: it is invalid or not supported.
    """
    _SchemaChecker(schema).check()
    check_termination(schema)
    if is_strict:
        # Values of keywords that the engine ignores next to others are not checked above.
        check_shape(schema)
        check_imposed(schema)


def resolve_reference(root: Any, reference: str) -> Any:
    """Return the target of a local reference, a JSON pointer (RFC 6901) after ``#``; None if there is none."""
    found = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(part, found.get(key))
        elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return None
    return found


_INDEX: Final = re.compile("0|[1-9][0-9]{0,4}")


def kinds_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the types of a schema, or the one that its keywords imply; empty for any type."""
    kinds = schema.get("type")
    if "type" in schema and kinds != []:
        return kinds if isinstance(kinds, list) else [kinds]
    return [kind for kind, words in _IMPLIED.items() if any(word in schema for word in words)][:1]


def with_integer_bounds(schema: Any) -> Any:
    """Return a schema whose number bounds are integers of at most 15 digits, the only ones that xgrammar writes right.

    Other bounds are dropped, or rounded: for integers without effect, for numbers to a wider range.
    """
    if isinstance(schema, list):
        return [with_integer_bounds(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    is_integer = schema.get("type") == "integer"
    return {
        word: value
        if word in _VALUE_KEYWORDS
        else _rounded(word, value, is_integer=is_integer)
        if word in _BOUNDS and isinstance(value, float)
        else with_integer_bounds(value)
        for word, value in schema.items()
        if not _is_wide(word, value)
    }


def _rounded(word: str, value: float, *, is_integer: bool) -> float:
    if value.is_integer() or not math.isfinite(value):
        return value
    rounds_up = word in ({"minimum", "exclusiveMaximum"} if is_integer else _UPPER_BOUNDS)
    return math.ceil(value) if rounds_up else math.floor(value)


def _is_wide(word: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (word in _LOWER_BOUNDS and value <= -_MAX_INTEGER) or (word in _UPPER_BOUNDS and value >= _MAX_INTEGER)


class _SchemaChecker:
    def __init__(self, root: Any) -> None:
        self._root: Final = root
        self._seen: Final[set[str]] = set()
        self._parts = 0
        self._length_sum = 0
        self._optional = 0

    def check(self) -> None:
        try:
            json.dumps(self._root, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise GrammarRefused("$", "it has an invalid number or character, or is nested too deeply") from None
        self._visit(self._root, "$", 0)

    def _visit(self, schema: Any, path: str, depth: int) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            _refuse(path, f"the schema has more than {_MAX_PARTS} parts")
        if depth > _MAX_DEPTH:
            _refuse(path, f"the schema is nested more than {_MAX_DEPTH} deep")
        if schema is True:
            return
        if schema is False:
            _refuse(path, "false allows no value; remove the property")
        if not isinstance(schema, Mapping):
            _refuse(path, f"expected an object, got {_shown(schema)}")
        for keyword, visit in (
            ("$ref", self._reference),
            ("const", lambda *_: None),
            ("enum", self._enum),
            ("anyOf", self._any_of),
            ("oneOf", self._any_of),
            ("allOf", self._all_of),
        ):
            if keyword in schema:
                visit(schema[keyword], f"{path}.{keyword}", depth)
                return
        self._typed(schema, path, depth)

    def _reference(self, reference: Any, path: str, depth: int) -> None:
        if not isinstance(reference, str):
            _refuse(path, f"expected a string, got {_shown(reference)}")
        if reference != "#" and not reference.startswith("#/"):
            _refuse(
                path,
                f"{reference!r}: external references are not supported; put the schema into $defs; use '#/$defs/...'",
            )
        if reference != "#" and not reference.strip("#/"):
            _refuse(path, f"{reference!r} is invalid; the root schema is '#'")
        if reference in self._seen:
            return
        self._seen.add(reference)
        found = resolve_reference(self._root, reference)
        if found is None:
            _refuse(path, f"{reference!r} not found")
        if reference != "#":
            self._visit(found, reference.replace("#", "$").replace("/", "."), depth + 1)

    def _enum(self, values: Any, path: str, depth: int) -> None:
        del depth
        if not isinstance(values, list) or not values:
            _refuse(path, "expected a list of values")
        if len(values) > _MAX_PARTS:
            _refuse(path, f"{len(values)} values; at most {_MAX_PARTS} are allowed")

    def _any_of(self, choices: Any, path: str, depth: int) -> None:
        if not isinstance(choices, list) or not choices:
            _refuse(path, "expected a list of schemas")
        for number, choice in enumerate(choices):
            self._visit(choice, f"{path}[{number}]", depth + 1)

    def _all_of(self, parts: Any, path: str, depth: int) -> None:
        if not isinstance(parts, list) or not parts:
            _refuse(path, "expected a list of schemas")
        if len(parts) > 1:
            _refuse(path, "several schemas in allOf are not supported; merge them into one")
        self._visit(parts[0], f"{path}[0]", depth + 1)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        for kind in kinds_of(schema):
            if kind not in _TYPES:
                _refuse(f"{path}.type", f"expected one of {', '.join(_TYPES)}, got {_shown(kind)}")
            if kind == "object":
                self._object(schema, path, depth)
            elif kind == "array":
                self._array(schema, path, depth)
            elif kind == "string":
                self._length_sum += min(_check_string(schema, path), _MAX_COUNTED_LENGTH)
                if self._length_sum > _MAX_LENGTH_SUM:
                    error = f"string length bounds sum to more than {_MAX_LENGTH_SUM} characters, which compile slowly"
                    _refuse(path, f"{error}; remove minLength and maxLength")
            elif kind in {"integer", "number"}:
                _check_number(schema, path, whole=kind == "integer")

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        properties = _mapping(schema, "properties", path)
        for name, value in properties.items():
            self._visit(value, f"{path}.properties.{name}", depth + 1)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(f"{path}.required", "expected a list of names")
        self._optional += len(properties.keys() - set(required)) ** 2
        if self._optional > _MAX_OPTIONAL**2:
            error = f"more than {_MAX_OPTIONAL} optional properties compile slowly"
            _refuse(f"{path}.required", f"{error}; make them required, or allow null")
        patterns = _mapping(schema, "patternProperties", path)
        for pattern, value in patterns.items():
            check_pattern(pattern, f"{path}.patternProperties")
            self._visit(value, f"{path}.patternProperties.{pattern}", depth + 1)
        if names := _mapping(schema, "propertyNames", path):
            self._visit({**names, "type": "string"}, f"{path}.propertyNames", depth + 1)
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            if (value := schema.get(keyword, False)) is not False:
                self._visit(value, f"{path}.{keyword}", depth + 1)
        for keyword in ("minProperties", "maxProperties"):
            _count(schema, keyword, path, _MAX_PROPERTIES)

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            _refuse(f"{path}.prefixItems", "expected a list of schemas")
        for number, item in enumerate(prefix):
            self._visit(item, f"{path}.prefixItems[{number}]", depth + 1)
        keyword = "items" if "items" in schema else "unevaluatedItems"
        items = schema.get(keyword, False)
        if items is not False:
            if isinstance(items, list):
                _refuse(f"{path}.{keyword}", "a list of schemas must be in prefixItems")
            self._visit(items, f"{path}.{keyword}", depth + 1)
        least = max(_count(schema, word, path, _MAX_ITEMS) or 0 for word in ("minItems", "minContains"))
        most = _count(schema, "maxItems", path, _MAX_ITEMS)
        if most is not None and max(least, len(prefix)) > most:
            _refuse(path, f"maxItems {most} is less than minItems or the length of prefixItems")


_IMPLIED: Final = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}


def _check_string(schema: Mapping[str, Any], path: str) -> int:
    """Check string keywords; return the length bound, 0 for none."""
    least = _count(schema, "minLength", path) or 0
    most = _count(schema, "maxLength", path)
    if most is not None and most < least:
        _refuse(path, f"maxLength {most} is less than minLength {least}")
    bound = max(least, most or 0)
    check_repetition(path, bound)
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            _refuse(f"{path}.pattern", f"expected a string, got {_shown(schema['pattern'])}")
        check_pattern(schema["pattern"], f"{path}.pattern")
    return bound


def _check_number(schema: Mapping[str, Any], path: str, *, whole: bool) -> None:
    bounds: dict[str, float] = {}
    for word in _BOUNDS:
        if word not in schema:
            continue
        value = schema[word]
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(f"{path}.{word}", f"expected a number, got {_shown(value)}")
        if _is_wide(word, value):
            continue
        if abs(value) > _MAX_INTEGER:
            _refuse(f"{path}.{word}", f"expected a number up to {_MAX_INTEGER}, got {value}; remove the bound")
        bounds[word] = value
    step = 1 if whole else 0
    least = bounds["exclusiveMinimum"] + step if "exclusiveMinimum" in bounds else bounds.get("minimum")
    most = bounds["exclusiveMaximum"] - step if "exclusiveMaximum" in bounds else bounds.get("maximum")
    if least is None or most is None:
        return
    if least > most:
        _refuse(path, f"no number is between {least} and {most}")
    if least == most and not whole and not bounds.keys().isdisjoint({"exclusiveMinimum", "exclusiveMaximum"}):
        _refuse(path, f"no number is strictly between {least} and {most}")


def _mapping(schema: Mapping[str, Any], keyword: str, path: str) -> Mapping[str, Any]:
    found = schema.get(keyword, {})
    if not isinstance(found, Mapping):
        _refuse(f"{path}.{keyword}", f"expected an object, got {_shown(found)}")
    return found


def _count(schema: Mapping[str, Any], keyword: str, path: str, maximum: int = 1 << 62) -> int | None:
    if keyword not in schema:
        return None
    found = schema[keyword]
    if type(found) is not int or not 0 <= found <= maximum:
        up_to = f" up to {maximum}" if maximum < 1 << 62 else ""
        _refuse(f"{path}.{keyword}", f"expected an integer{up_to}, got {_shown(found)}")
    return found


def _shown(value: Any) -> str:
    return cut(json.dumps(value, ensure_ascii=False), _MAX_SHOWN_CHARACTERS)


def _refuse(path: str, message: str) -> NoReturn:
    raise GrammarRefused(path, message)
