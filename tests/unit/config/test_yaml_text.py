from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.located import InvalidSyntax
from ovmstrio.config.yaml_text import parse_yaml

_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates()
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@given(_values, st.sampled_from([True, False, None]))
def test_values_are_those_of_the_library(value: Any, flow: bool | None) -> None:
    """Whatever style the text is written in."""
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert parse_yaml(text).root.plain() == yaml.safe_load(text)


def test_every_value_has_its_place() -> None:
    """A member's line is its key's; texts are as they are written."""
    document = parse_yaml("a:\n  b:\n    - 1\n    - {c: 3.10}\nd e:\n  x\n")
    found = document.root.find("a", "b", 1, "c")
    assert (found.value, found.line, found.path) == (3.1, 4, "a.b[1].c")
    assert found.text == "3.10"
    other = document.root.find("d e")
    assert (other.value, other.line, other.path) == ("x", 5, '["d e"]')


def test_what_is_merged_counts_less() -> None:
    """Own keys come first, then the mappings in their order; none of it is a repetition."""
    text = "one: &one {a: 1, b: 1.0}\ntwo: &two {a: 2, c: 2}\nall:\n  <<: [*one, *two]\n  b: 3.0\n"
    document = parse_yaml(text)
    assert document.repeated == ()
    assert document.root.find("all").plain() == {"a": 1, "b": 3.0, "c": 2} == yaml.safe_load(text)["all"]
    assert document.root.find("all", "b").text == "3.0"


def test_aliases_of_aliases_come_to_an_end() -> None:
    """A short text cannot become a huge value."""
    text = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    with pytest.raises(InvalidSyntax, match="more than 100000 values"):
        parse_yaml(text)


def test_a_tab_is_explained() -> None:
    """It looks like what is meant."""
    with pytest.raises(InvalidSyntax) as caught:
        parse_yaml("a:\n\tb: 1\n")
    assert (caught.value.line, caught.value.suggestion) == (2, "indent with spaces")
