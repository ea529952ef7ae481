"""Check of JSON schemas: their shape, limits, and keywords that the engine would ignore; errors have a path.

The engine judges everything else, such as the syntax of a ``pattern``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

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
                target = root
                for key in reference.removeprefix("#").split("/"):
                    if key:
                        target = target.get(key, True) if isinstance(target, Mapping) else True
                found[reference] = target
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
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind not in {"object", "array"} for kind in kinds):
        return True
    return (("object" in kinds or not kinds) and _object_ends(schema, finite)) or (
        ("array" in kinds or not kinds) and _array_ends(schema, finite)
    )


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
# Schemas
# ----------------------------------------------------------------------

_TYPES: Final = ("string", "integer", "number", "boolean", "object", "array", "null")
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
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused("", f"the {subject} is not valid JSON: {error}") from error


def check_schema(schema: Any) -> None:
    """Check a schema.

    Raises:
        GrammarRefused: it is invalid or not supported.
    """
    _SchemaChecker(schema).check()
    check_termination(schema)


def resolve_reference(root: Any, reference: str) -> Any:
    """Return the target of a local reference, or None."""
    found = root
    for part in reference.removeprefix("#").split("/"):
        if part:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found


def without_wide_bounds(schema: Any) -> Any:
    """Return a schema without number bounds beyond 15 digits, which xgrammar cannot read."""
    if isinstance(schema, list):
        return [without_wide_bounds(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        word: value if word in _VALUE_KEYWORDS else without_wide_bounds(value)
        for word, value in schema.items()
        if not _is_wide(word, value)
    }


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
        kinds = schema.get("type")
        if "type" not in schema or kinds == []:
            implied = [kind for kind, words in _IMPLIED.items() if any(word in schema for word in words)]
            kinds = implied[0] if implied else []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
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
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
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
