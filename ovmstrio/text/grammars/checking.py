"""Check of a grammar's shape and limits before the engine gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.text.grammars.limits import GrammarRefused, check_ebnf, check_pattern
from ovmstrio.text.grammars.schemas import check_schema, read_json

_MAX_DEPTH: Final = 16
_MAX_PARTS: Final = 1000


def check_grammar(grammar: Grammar) -> None:
    """Check the shape and limits of a grammar; takes milliseconds at most, linear in its length.

    Raises:
        GrammarRefused: it is malformed, exceeds a limit, or has a part that the engine would ignore.
    """
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            check_schema(read_json(grammar.text), is_strict=grammar.is_strict)
        elif grammar.kind is GrammarKind.REGEX:
            check_pattern(grammar.text)
        elif grammar.kind is GrammarKind.EBNF:
            check_ebnf(grammar.text)
        elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
            _check_structural_tag(grammar.text)
    except GrammarRefused as refused:
        raise refused.of(grammar.field) from None


def _check_structural_tag(text: str) -> None:
    tag = read_json(text, "structural tag")
    if not isinstance(tag, Mapping) or "format" not in tag:
        _refuse("$", 'expected {"type": "structural_tag", "format": {...}}')
    left: list[tuple[Any, str, int]] = [(tag["format"], "$.format", 0)]
    for number, (form, path, depth) in enumerate(left):
        if depth > _MAX_DEPTH or number >= _MAX_PARTS:
            _refuse(path, f"the tag is nested more than {_MAX_DEPTH} deep, or has more than {_MAX_PARTS} parts")
        if not isinstance(form, Mapping):
            _refuse(path, "expected an object")
        for keyword, check in _NESTED_GRAMMARS.items():
            if keyword in form:
                _check_nested(f"{path}.{keyword}", check, form[keyword])
        for keyword in ("elements", "tags"):
            parts = form.get(keyword, [])
            if not isinstance(parts, list):
                _refuse(f"{path}.{keyword}", "expected a list")
            left += [(part, f"{path}.{keyword}[{place}]", depth + 1) for place, part in enumerate(parts)]
        if "content" in form:
            left.append((form["content"], f"{path}.content", depth + 1))


def _check_text(check: Callable[[str], None], value: Any) -> None:
    if not isinstance(value, str):
        _refuse("", "expected a string")
    check(value)


_NESTED_GRAMMARS: Final[Mapping[str, Callable[[Any], None]]] = {
    "json_schema": check_schema,
    "pattern": lambda value: _check_text(check_pattern, value),
    "grammar": lambda value: _check_text(check_ebnf, value),
}


def _check_nested(path: str, check: Callable[[Any], None], value: Any) -> None:
    try:
        check(value)
    except GrammarRefused as refused:
        raise refused.of(refused.field, path) from None


def _refuse(path: str, message: str) -> NoReturn:
    raise GrammarRefused(path, message)
