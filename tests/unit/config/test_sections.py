from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import locate
from ovmstrio.config.sections import (
    Rule,
    Rules,
    Section,
    Unusable,
    any_spelling,
    any_word,
    choice,
    flag,
    number,
    rules_of,
    text,
    texts,
    whole,
    written,
)
from ovmstrio.config.yaml_text import parse_yaml

_RULES: Rules = {"count": whole(1), "name": text, "inner": None}


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


def test_all_problems_of_a_section_are_reported_by_line() -> None:
    section = _section("cuont: 3\nname: 4\ninner: {}\nother: 1\nempty:\n")
    assert section.read(_RULES, required=("count",)) == {}
    reported = [(problem.line, problem.path, problem.message, problem.severity) for problem in section.findings.all]
    assert reported == [
        (1, "cuont", "the key 'count' is missing", "error"),
        (2, "name", "the value cannot be used", "error"),
        (4, "other", "unknown key 'other', which has no effect", "warning"),
        (5, "empty", "unknown key 'empty', which has no effect", "warning"),
    ]
    assert section.findings.all[2].suggestion == "known are count, name, inner"


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


def test_annotated_fields_are_the_keys_of_settings() -> None:
    @dataclass
    class Settings:
        count: Annotated[int, whole(1)] = 1
        source: str = ""

    rules = rules_of(Settings)
    assert list(rules) == ["count"]
    assert rules["count"](locate(2)) == 2


def test_a_problem_outside_a_file_has_no_line() -> None:
    section = Section(locate({"count": 0}), Findings("settings"))
    section.read(_RULES)
    (problem,) = section.findings.all
    assert str(problem) == "settings: count: the value cannot be used (expected a whole number of 1 or more, found 0)"
