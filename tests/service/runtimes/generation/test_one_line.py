"""Texts of schemas stand on one line, end, and fit their schema, whatever a model likes to write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.runtimes.generation.grammars import check_grammar, on_one_line
from ovmstrio.runtimes.generation.grammars.numerals import INTEGER, NUMBER, integers, numbers
from ovmstrio.runtimes.generation.grammars.one_line import one_line_rules
from tests.support.grammar_engine import GrammarEngine, grammar_engine
from tests.support.tiny_llm import write_tiny_folder

SHORT: Final = Field(max_length=2)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Part(_Closed):
    word: Literal['"', "\\", "é", "/"]
    more: _Part | None = None


class _Thing(_Closed):
    name: Annotated[str, Field(min_length=1, max_length=4)]
    size: Annotated[int, Field(ge=-20, lt=137)]
    share: Annotated[float, Field(ge=0, le=1)] = 0
    price: Annotated[float, Field(gt=0)] | None = None
    tags: Annotated[list[Literal["a", "b"]], SHORT] = []
    pair: tuple[bool, None]
    part: _Part


class _Optional(_Closed):
    a: bool = True
    b: Annotated[int, Field(ge=0, le=3)] = 0
    c: None = None


SHAPES: Final[tuple[Any, ...]] = (
    _Thing,
    _Optional,
    Annotated[list[_Optional], Field(min_length=1, max_length=3)],
    Annotated[dict[str, bool], Field()],
    Literal[1, "a", True] | None,
    int | bool | None,
    float,
)


ENDLESS: Final = (SHAPES[0], SHAPES[3])
"""Of these, one that holds itself and one of any number of names, texts may go on."""


def _is_whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarEngine]:
    """A real engine with a tiny model, whose texts are noise."""
    folder = write_tiny_folder(Path(tmp_path_factory.mktemp("tiny")) / "model")
    with grammar_engine(folder) as running:
        yield running


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_noise_is_made_to_fit_and_to_end(engine: GrammarEngine, shape: Any) -> None:
    """Only what may be of any length may run on."""
    adapter = TypeAdapter(shape)
    grammar = on_one_line(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(adapter.json_schema())))
    assert grammar.kind is GrammarKind.EBNF
    check_grammar(grammar)
    ended = 0
    for seed in range(6):
        error, text = engine.make(grammar, tokens=400, seed=seed)
        assert error == ""
        assert "\n" not in text
        assert "  " not in re.sub(r'"(\\.|[^"\\])*"', "", text)
        if shape in ENDLESS and not _is_whole(text):
            continue
        adapter.validate_json(text)
        ended += 1
    assert ended


def test_any_object_stands_on_one_line(engine: GrammarEngine) -> None:
    """That is all that is asked for by ``json_object``."""
    grammar = on_one_line(Grammar(GrammarKind.JSON_OBJECT, ""))
    check_grammar(grammar)
    for seed in range(4):
        error, text = engine.make(grammar, tokens=60, seed=seed)
        assert error == ""
        assert text.startswith("{")
        assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*("|$)|(?<=[:,]) ', "", text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "a+"},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"type": "number", "minimum": 0.5},
        {"type": "object", "minProperties": 1, "additionalProperties": True},
        {"type": "string", "maxLength": 100_000},
        {"type": "object", "required": ["a"]},
    ],
)
def test_what_has_no_rules_here_is_left_to_the_library(schema: Any) -> None:
    """As it is."""
    given = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert on_one_line(given) is given


_WIDE: Final = {"minimum": -(2**53) + 1, "exclusiveMaximum": 2**63}


def test_bounds_that_no_number_reaches_are_no_bounds(engine: GrammarEngine) -> None:
    """Clients for JavaScript send those of its whole numbers, which the library cannot read."""
    whole = {"type": "integer", **_WIDE}
    line = on_one_line(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole)))
    assert line == on_one_line(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'))

    parts = {"a": whole, "b": {"type": "string", "format": "date"}, "c": {"const": {"minimum": -(2**60)}}}
    schema = {"type": "object", "properties": parts, "required": [*parts]}
    left = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    check_grammar(left)
    given = on_one_line(left)
    assert json.loads(given.text)["properties"] == {**parts, "a": {"type": "integer"}}
    assert engine.make(given, tokens=4)[0] == ""


def test_rules_that_are_referred_to_are_written_once() -> None:
    """However often."""
    part = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}
    rules = one_line_rules({**part, "$defs": {"n": {"enum": ["once"]}}})
    assert rules is not None
    assert rules.count("once") == 1


def _pattern(rule: str) -> re.Pattern[str]:
    """Give numerals' rules, which have nothing but texts, classes and groups, as a pattern."""
    tokens = re.findall(r'"([^"]*)"|(\[[^]]*\](?:\{[^}]*\})?|[()|?*]|\{[^}]*\})', rule)
    return re.compile("".join(sign or f"(?:{re.escape(text)})" for text, sign in tokens))


BOUND = st.none() | st.integers(-1200, 1200) | st.integers(-11, 11)


@given(BOUND, BOUND, st.integers(-1500, 1500))
def test_whole_numbers_within_bounds_and_no_others_have_numerals(a: int | None, b: int | None, value: int) -> None:
    """Of either sign."""
    least, most = (a, b) if a is None or b is None else sorted((a, b))
    written = _pattern(integers(least, most))
    for each in {value, *(bound + step for bound in (a, b) if bound is not None for step in (-1, 0, 1))}:
        fits = (least is None or each >= least) and (most is None or each <= most)
        assert bool(written.fullmatch(str(each))) == fits, each


@given(BOUND, BOUND, st.integers(-6000, 6000), st.booleans(), st.booleans())
def test_numbers_within_bounds_and_no_others_have_numerals(
    a: int | None, b: int | None, quarters: int, above: bool, below: bool
) -> None:
    """With the bounds, or without them."""
    least, most = (a, b) if a is None or b is None else sorted((a, b))
    if least == most and (above or below):
        return
    written = _pattern(numbers(least, most, above=above and least is not None, below=below and most is not None))
    near = [bound + step / 4 for bound in (a, b, 0) if bound is not None for step in (-4, -1, 0, 1, 4)]
    for each in [quarters / 4, *near]:
        over = least is None or each > least or (each == least and not above)
        under = most is None or each < most or (each == most and not below)
        text = f"{each:g}"
        found = written.fullmatch(text) or (each == 0 and written.fullmatch("-0"))
        assert bool(found) == (over and under), text


def test_numerals_have_an_end() -> None:
    """No model writes digits for ever."""
    assert not _pattern(INTEGER).fullmatch("1" * 16)
    assert _pattern(INTEGER).fullmatch("-" + "1" * 15)
    assert _pattern(NUMBER).fullmatch("-0.5e-10")
    assert not _pattern(NUMBER).fullmatch("0." + "1" * 16)
    assert not _pattern(NUMBER).fullmatch("01")
