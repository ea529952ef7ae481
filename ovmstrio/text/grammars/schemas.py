"""JSON schemas as xgrammar 0.1.31 reads them; what it fails of, or takes for anything, is refused with its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ovmstrio.text.grammars.patterns import check_pattern
from ovmstrio.text.grammars.refusals import MOST_TEXT, GrammarRefused, limit_repetition

__all__ = ["check_ends", "check_schema", "read_schema", "resolved", "without_wide_bounds"]

# ----------------------------------------------------------------------
# Schemas and grammars that no finite text fits, because what they refer to needs itself
# ----------------------------------------------------------------------


def check_ends(root: Any) -> None:
    """See that each part that is referred to can be written in a finite text.

    Raises:
        GrammarRefused: one cannot.
    """
    targets = {"#": root, **_targets(root)}
    finite: set[str] = set()
    while grown := {name for name in targets.keys() - finite if _ends(targets[name], finite)}:
        finite |= grown
    for name in targets:
        if name not in finite:
            raise GrammarRefused(
                name.replace("#", "$").replace("/", "."),
                "it needs itself, so that no answer could end; let a property of it be optional, or null a choice",
            )


def _targets(root: Any) -> dict[str, Any]:
    """Give what references that can be reached mean, by how they are written."""
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
# JSON schemas as xgrammar 0.1.31 reads them; what it fails of, or takes for anything, is refused with its path
# ----------------------------------------------------------------------

_TYPES: Final = ("string", "integer", "number", "boolean", "object", "array", "null")
_MOST_DEPTH: Final = 48
_MOST_PARTS: Final = 4000
_MOST_INTEGER: Final = 10**15
_MOST_ITEMS: Final = 20_000
_MOST_PROPERTIES: Final = 500
_LEAST: Final = frozenset({"minimum", "exclusiveMinimum"})
_GREATEST: Final = frozenset({"maximum", "exclusiveMaximum"})
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
"""Words of schemas that are followed by values, not by schemas."""
_MOST_COUNTED: Final = 300
"""Up to so many letters a bound of a text's length takes the library the longer the higher it is, 20 ms each."""
_MOST_LETTERS: Final = 1500
"""Of all bounds together; the batch stands still while they are compiled."""
_MOST_OPTIONAL: Final = 300
"""Properties that may be left out; what they take grows with the square of their number, one object's by itself."""
_UNWRITABLE: Final = frozenset('"\\')
_FIRST_LETTER: Final = " "


def read_schema(text: str) -> Any:
    """Give the schema that is written as JSON.

    Raises:
        GrammarRefused: it is no JSON, or too large.
    """
    if len(text) > MOST_TEXT:
        raise GrammarRefused("", f"the schema has {len(text)} letters, where {MOST_TEXT} are the most")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused("", f"the schema is no JSON: {error}") from error


def check_schema(schema: Any) -> None:
    """See that a schema can be imposed.

    Raises:
        GrammarRefused: it cannot, with the path and the way out.
    """
    _Schema(schema).check()
    check_ends(schema)


def resolved(root: Any, reference: str) -> Any:
    """Give what a local reference means; None where there is nothing."""
    found = root
    for part in reference.removeprefix("#").split("/"):
        if part:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found


def without_wide_bounds(schema: Any) -> Any:
    """Leave out the bounds of numbers beyond any number that is written, which the library cannot read."""
    if isinstance(schema, list):
        return [without_wide_bounds(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        word: value if word in _VALUES else without_wide_bounds(value)
        for word, value in schema.items()
        if not _is_wide(word, value)
    }


def _is_wide(word: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (word in _LEAST and value <= -_MOST_INTEGER) or (word in _GREATEST and value >= _MOST_INTEGER)


class _Schema:
    def __init__(self, root: Any) -> None:
        self._root: Final = root
        self._seen: Final[set[str]] = set()
        self._parts = 0
        self._letters = 0
        self._optional = 0

    def check(self) -> None:
        try:
            json.dumps(self._root, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise GrammarRefused("$", "it has a number or a letter that is none, or is nested too deeply") from None
        self._visit(self._root, "$", 0)

    def _visit(self, schema: Any, path: str, depth: int) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            _refuse(path, f"the schema has more than {_MOST_PARTS} parts")
        if depth > _MOST_DEPTH:
            _refuse(path, f"the schema is nested more than {_MOST_DEPTH} deep")
        if schema is True:
            return
        if schema is False:
            _refuse(path, "false takes no value; leave the property out")
        if not isinstance(schema, Mapping):
            _refuse(path, f"expected an object, got {_named(schema)}")
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
            _refuse(path, f"expected a text, got {_named(reference)}")
        if reference != "#" and not reference.startswith("#/"):
            _refuse(path, f"{reference!r} lies elsewhere; put the schema into $defs, and refer to '#/$defs/...'")
        if reference != "#" and not reference.strip("#/"):
            _refuse(path, f"{reference!r} names nothing; the whole schema is '#'")
        if reference in self._seen:
            return
        self._seen.add(reference)
        found = resolved(self._root, reference)
        if found is None:
            _refuse(path, f"there is nothing at {reference!r}")
        if reference != "#":
            self._visit(found, reference.replace("#", "$").replace("/", "."), depth + 1)

    def _enum(self, values: Any, path: str, depth: int) -> None:
        del depth
        if not isinstance(values, list) or not values:
            _refuse(path, "expected a list of values")
        if len(values) > _MOST_PARTS:
            _refuse(path, f"{len(values)} values, where {_MOST_PARTS} are the most")

    def _any_of(self, choices: Any, path: str, depth: int) -> None:
        if not isinstance(choices, list) or not choices:
            _refuse(path, "expected a list of schemas")
        for number, choice in enumerate(choices):
            self._visit(choice, f"{path}[{number}]", depth + 1)

    def _all_of(self, parts: Any, path: str, depth: int) -> None:
        if not isinstance(parts, list) or not parts:
            _refuse(path, "expected a list of schemas")
        if len(parts) > 1:
            _refuse(path, "several schemas at once cannot be imposed; write them as one")
        self._visit(parts[0], f"{path}[0]", depth + 1)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        kinds = schema.get("type")
        if "type" not in schema or kinds == []:
            implied = [kind for kind, words in _IMPLIED.items() if any(word in schema for word in words)]
            kinds = implied[0] if implied else []
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if kind not in _TYPES:
                _refuse(f"{path}.type", f"expected one of {', '.join(_TYPES)}, got {_named(kind)}")
            if kind == "object":
                self._object(schema, path, depth)
            elif kind == "array":
                self._array(schema, path, depth)
            elif kind == "string":
                self._letters += min(_check_string(schema, path), _MOST_COUNTED)
                if self._letters > _MOST_LETTERS:
                    told = f"lengths of texts are bounded to more than {_MOST_LETTERS} letters together"
                    _refuse(path, f"{told}, which takes long to compile; leave out minLength and maxLength")
            elif kind in {"integer", "number"}:
                _check_number(schema, path, whole=kind == "integer")

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        properties = _mapping(schema, "properties", path)
        for name, value in properties.items():
            if any(letter in _UNWRITABLE or letter < _FIRST_LETTER for letter in name):
                _refuse(f"{path}.properties", f"the name {name!r} has a letter that cannot be imposed in names")
            self._visit(value, f"{path}.properties.{name}", depth + 1)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _refuse(f"{path}.required", "expected a list of names")
        self._optional += len(properties.keys() - set(required)) ** 2
        if self._optional > _MOST_OPTIONAL**2:
            told = f"more than {_MOST_OPTIONAL} properties may be left out, which takes long to compile"
            _refuse(f"{path}.required", f"{told}; list those that are needed, or let them be null")
        patterns = _mapping(schema, "patternProperties", path)
        for pattern, value in patterns.items():
            check_pattern(pattern, f"{path}.patternProperties")
            self._visit(value, f"{path}.patternProperties.{pattern}", depth + 1)
        self._names(schema, path, depth)
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            if (value := schema.get(keyword, False)) is not False:
                self._visit(value, f"{path}.{keyword}", depth + 1)
        self._number_of_properties(schema, path, properties, required)

    def _names(self, schema: Mapping[str, Any], path: str, depth: int) -> None:
        names = _mapping(schema, "propertyNames", path)
        if names:
            if names.get("type", "string") != "string":
                _refuse(f"{path}.propertyNames.type", "names are of the type string")
            self._visit({**names, "type": "string"}, f"{path}.propertyNames", depth + 1)

    @staticmethod
    def _number_of_properties(
        schema: Mapping[str, Any], path: str, properties: Mapping[str, Any], required: list[str]
    ) -> None:
        least = _count(schema, "minProperties", path, _MOST_PROPERTIES) or 0
        most = _count(schema, "maxProperties", path, _MOST_PROPERTIES)
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", False)) is not False
        is_open = others or bool(schema.get("patternProperties")) or "propertyNames" in schema
        if most is not None and max(least, len(set(required))) > most:
            _refuse(path, f"maxProperties {most} is less than what must be there")
        if not is_open and least > len(properties):
            _refuse(
                path, f"minProperties {least} is more than there are properties; allow others by additionalProperties"
            )

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
                _refuse(f"{path}.{keyword}", "a list of schemas is called prefixItems")
            self._visit(items, f"{path}.{keyword}", depth + 1)
        least = max(_count(schema, word, path, _MOST_ITEMS) or 0 for word in ("minItems", "minContains"))
        most = _count(schema, "maxItems", path, _MOST_ITEMS)
        if most is not None and max(least, len(prefix)) > most:
            _refuse(path, f"maxItems {most} is less than what must be there")
        if items is False and least > len(prefix):
            _refuse(path, f"minItems {least} is more than there are schemas of items; say by items what they are")


_IMPLIED: Final = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}


def _check_string(schema: Mapping[str, Any], path: str) -> int:
    """Check what is said of a text; give to how many letters its length is bounded, 0 for any number."""
    if not isinstance(schema.get("format", ""), str):
        _refuse(f"{path}.format", f"expected a text, got {_named(schema['format'])}")
    least = _count(schema, "minLength", path) or 0
    most = _count(schema, "maxLength", path)
    if most is not None and most < least:
        _refuse(path, f"maxLength {most} is less than minLength {least}")
    bound = max(least, most or 0)
    limit_repetition(path, bound, 1)
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            _refuse(f"{path}.pattern", f"expected a text, got {_named(schema['pattern'])}")
        check_pattern(schema["pattern"], f"{path}.pattern")
    return bound


def _check_number(schema: Mapping[str, Any], path: str, *, whole: bool) -> None:
    bounds: dict[str, float] = {}
    for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if word not in schema:
            continue
        value = schema[word]
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(f"{path}.{word}", f"expected a number, got {_named(value)}")
        if _is_wide(word, value):
            continue
        if whole and value != int(value):
            _refuse(f"{path}.{word}", f"expected a whole number, got {value}")
        if abs(value) > _MOST_INTEGER:
            _refuse(f"{path}.{word}", f"expected a number up to {_MOST_INTEGER}, got {value}; leave the bound out")
        bounds[word] = value
    step = 1 if whole else 0
    least = bounds["exclusiveMinimum"] + step if "exclusiveMinimum" in bounds else bounds.get("minimum")
    most = bounds["exclusiveMaximum"] - step if "exclusiveMaximum" in bounds else bounds.get("maximum")
    if least is None or most is None:
        return
    if least > most:
        _refuse(path, f"no number is from {least} to {most}")
    if least == most and not whole and not bounds.keys().isdisjoint({"exclusiveMinimum", "exclusiveMaximum"}):
        _refuse(path, f"no number is from {least} to {most} without these")


def _mapping(schema: Mapping[str, Any], keyword: str, path: str) -> Mapping[str, Any]:
    found = schema.get(keyword, {})
    if not isinstance(found, Mapping):
        _refuse(f"{path}.{keyword}", f"expected an object, got {_named(found)}")
    return found


def _count(schema: Mapping[str, Any], keyword: str, path: str, most: int = 1 << 62) -> int | None:
    if keyword not in schema:
        return None
    found = schema[keyword]
    if type(found) is not int or not 0 <= found <= most:
        up_to = f" up to {most}" if most < 1 << 62 else ""
        _refuse(f"{path}.{keyword}", f"expected a whole number{up_to}, got {_named(found)}")
    return found


def _named(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 60 else text[:56] + " ..."  # noqa: PLR2004 -- as much as is read at a glance


def _refuse(path: str, message: str) -> NoReturn:
    raise GrammarRefused(path, message)
