"""Schemas and grammars that no finite text fits, because what they refer to needs itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ovmstrio.runtimes.generation.grammars.refusals import GrammarRefused

__all__ = ["check_ends"]


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
