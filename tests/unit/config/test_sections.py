from __future__ import annotations

from typing import Any

import pytest

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import locate
from ovmstrio.config.sections import (
    Rule,
    Section,
    Unusable,
    any_spelling,
    any_word,
    choice,
    flag,
    number,
    text,
    texts,
    whole,
    written,
)
from ovmstrio.config.yaml_text import parse_yaml


def _section(content: str) -> Section:
    return Section(parse_yaml(content).root, Findings("F"))


@pytest.mark.parametrize(
    ("rule", "given", "value"),
    [
        (whole(), -3, -3),
        (whole(5, 9, 0), 0, 0),
        (number(0), 2, 2.0),
        (flag, False, False),
        (text, "", ""),
        (texts, ["a"], ("a",)),
        (choice(("a", "b")), "b", "b"),
        (any_spelling(whole(1)), "8080", 8080),
        (any_spelling(whole(1)), 8.0, 8),
        (any_spelling(number(0)), "1e-3", 0.001),
        (any_spelling(flag), "Yes", True),
    ],
)
def test_a_rule_returns_the_type_of_the_setting(rule: Rule, given: Any, value: Any) -> None:
    assert rule(locate(given)) == value


@pytest.mark.parametrize(
    ("rule", "given", "expected", "suggestion"),
    [
        (whole(1), True, "a whole number of 1 or more", ""),
        (whole(1, 9, 0), "3", "a whole number of 1 to 9 or 0", "remove the quotes"),
        (number(0, "a number of seconds"), float("nan"), "a number of seconds above 0", ""),
        (number(0), 10**400, "a number above 0", ""),
        (flag, "true", "true or false", "remove the quotes"),
        (text, 3, "a text", 'put it in quotes: "3"'),
        (texts, "a", "a list of texts", 'write a list: ["a"]'),
        (choice(("grpc", "brpc")), "grcp", "grpc or brpc", "did you mean 'grpc'?"),
        (any_spelling(whole(1)), "soon", "a whole number of 1 or more", ""),
        (any_spelling(whole(1)), 1.5, "a whole number of 1 or more", ""),
        (any_spelling(flag), 1, "true or false", ""),
    ],
)
def test_a_refusal_has_an_expected_form_and_a_suggestion(
    rule: Rule, given: Any, expected: str, suggestion: str
) -> None:
    with pytest.raises(Unusable) as caught:
        rule(locate(given))
    assert (caught.value.expected, caught.value.suggestion) == (expected, suggestion)


def test_scalars_keep_their_spelling() -> None:
    section = _section("version: 3.10\nword: Debug\nlist: [a]\n")
    assert section.read({"version": written, "word": any_word(("debug",)), "list": written}) == {
        "version": "3.10",
        "word": "debug",
    }
    assert [problem.path for problem in section.findings.all] == ["list"]


def test_nested_sections_are_mappings_or_lists_of_mappings() -> None:
    section = _section("one: {a: 1}\nmany: [{b: 2}, 3]\nwrong: 4\n")
    (many,) = section.sections("many") or []
    one = section.section("one")
    assert one is not None
    assert (one.node.plain(), many.node.plain()) == ({"a": 1}, {"b": 2})
    assert (section.section("absent"), section.section("wrong"), section.sections("wrong")) == (None, None, None)
    assert [(problem.path, problem.expected) for problem in section.findings.all] == [
        ("many[1]", "a mapping of keys to values"),
        ("wrong", "a mapping of keys to values"),
        ("wrong", "a list"),
    ]
