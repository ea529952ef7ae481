"""The form that an answer has to have, as bodies write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.api.openai.fields import shown
from ovmstrio.core.generation import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.api.openai.fields import Fields

__all__ = ["read_response_format"]

_WRITTEN: Final[Mapping[str, tuple[GrammarKind, tuple[str, ...]]]] = {
    "regex": (GrammarKind.REGEX, ("regex", "pattern")),
    "grammar": (GrammarKind.EBNF, ("grammar",)),
}
"""Forms that are texts, with the names that clients have for them."""
_KINDS: Final = ("text", "json_object", "json_schema", "regex", "grammar", "structural_tag")


def read_response_format(fields: Fields, name: str = "response_format") -> Grammar | None:
    """Read the form of an answer; None for any text.

    A schema lies below ``json_schema``, or, as the Responses API has it, beside the type.
    """
    form = fields.within(name)
    if form is None:
        return None
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        at = form.path("type")
        missing = f"{at} is missing" if kind is None else f"{at} is none of {', '.join(_KINDS)}"
        form.refuse("type", missing, got="" if kind is None else shown(kind))
        return None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, "")
    if kind == "json_schema":
        return _read_schema(form)
    if kind == "structural_tag":
        tag: dict[str, Any] | None = fields.mapping(name)
        return None if tag is None else Grammar(GrammarKind.STRUCTURAL_TAG, orjson.dumps(tag).decode())
    return _read_written(form, kind)


def _read_schema(form: Fields) -> Grammar | None:
    holder = form if form.get("schema") is not None else form.within("json_schema")
    if holder is None:
        if form.get("json_schema") is None:
            form.refuse("json_schema", f"{form.path('json_schema')} is missing")
        return None
    schema = holder.mapping("schema")
    if schema is None:
        if holder.get("schema") is None:
            holder.refuse("schema", f"{holder.path('schema')} is missing")
        return None
    return Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def _read_written(form: Fields, kind: str) -> Grammar | None:
    made, names = _WRITTEN[kind]
    for name in names:
        text = form.text(name)
        if text:
            return Grammar(made, text)
        if form.get(name) is not None:
            return None
    form.refuse(names[0], f"{form.path(names[0])} is missing")
    return None
