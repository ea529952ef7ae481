from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.json_text import parse_json
from ovmstrio.config.located import InvalidSyntax

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 0, 2]))
def test_values_are_those_of_the_standard_decoder(value: Any, indent: int | None) -> None:
    """Whatever the standard library writes is read back the same."""
    assert parse_json(json.dumps(value, indent=indent)).root.plain() == value


@given(st.text(alphabet='{}[]",:1 tnf\\u\n-.e/') | st.text())
def test_any_text_is_judged_as_the_standard_decoder_does(text: str) -> None:
    """No text fails otherwise than with a syntax error, and the same texts fail."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        expected = json.loads(text, parse_constant=refuse)
    except ValueError:
        with pytest.raises(InvalidSyntax):
            parse_json(text)
    else:
        assert parse_json(text).root.plain() == expected


def test_every_value_knows_its_line_and_path() -> None:
    """A member's line is that of its key; items of a list have lines of their own."""
    root = parse_json('{\n "a": [\n  1,\n  {"b c":\n   2}\n ]\n}').root
    found = [(node.path, node.line) for node in (root, root.find("a"), root.find("a", 0), root.find("a", 1, "b c"))]
    assert found == [("", 1), ("a", 2), ("a[0]", 3), ('a[1]["b c"]', 4)]


@pytest.mark.parametrize("steps", [("x",), (2,), ("a", 5), ("a", -1), ("a", "x")])
def test_finding_stops_where_the_document_does(steps: tuple[str | int, ...]) -> None:
    """The deepest value on the way is given."""
    root = parse_json('{"a": [1]}').root
    assert root.find(*steps) is (root.find("a") if steps[0] == "a" else root)


def test_repeated_keys_are_told() -> None:
    """The first one counts, the others are listed with their places."""
    document = parse_json('{"a": 1,\n"b": {"c": 1,\n"c": 2},\n"a": 3}')
    assert document.root.plain() == {"a": 1, "b": {"c": 1}}
    assert [(node.path, node.line, node.value) for node in document.repeated] == [("b.c", 3, 2), ("a", 4, 3)]


@pytest.mark.parametrize(
    ("text", "line", "message", "suggestion"),
    [
        ('{\n"a": 1,\n}', 3, "a comma stands before", "remove the comma"),
        ('{"a": 1\n"b": 2}', 2, 'expected ","', ""),
        ("{'a': 1}", 1, "key in double quotes", "double quotes"),
        ('{\n// why\n"a": 1}', 2, "key in double quotes", "no comments"),
        ('{"a": "x\ny"}', 1, "line break", ""),
        ('{"a":\n"x}', 2, "no closing quote", ""),
        ('{"a": [NaN]}', 1, "NaN is not a number", ""),
        ("", 1, "end of the file", ""),
        ("{}\n{}", 2, "expected the end of the file", ""),
        ("[" * 200, 1, "levels of nesting", ""),
        ('{"a": ' + "1" * 5000 + "}", 1, "digit", ""),
    ],
)
def test_a_syntax_error_says_where_and_what_to_do(text: str, line: int, message: str, suggestion: str) -> None:
    """The line, the reason, and the way out where it is known."""
    with pytest.raises(InvalidSyntax) as error:
        parse_json(text)
    assert error.value.line == line
    assert message in error.value.message
    assert suggestion in error.value.suggestion
