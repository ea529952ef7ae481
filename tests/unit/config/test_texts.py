from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator, Field, field_validator

from ovmstrio.config.documents import Findings, InvalidSyntax, parse_json, with_paths
from ovmstrio.config.proto_text import parse_proto
from ovmstrio.config.schema import (
    OPTIONAL,
    Key,
    NoEffect,
    Reader,
    Schema,
    check_members,
    is_whole,
    keys_of,
    lower_case,
    unquoted,
)
from ovmstrio.config.tensor_mapping import MAPPING_FILE, NO_MAPPING, TensorMapping, read_mapping
from ovmstrio.config.yaml_documents import parse_yaml
from ovmstrio.core.errors import ConfigError

_JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
_YAML_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates()
_YAML_VALUES = st.recursive(
    _YAML_SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=20,
)


@given(_JSON_VALUES, st.sampled_from([None, 0, 2]))
def test_json_values_round_trip(value: Any, indent: int | None) -> None:
    assert parse_json(json.dumps(value, indent=indent)).root.plain() == value


@given(st.text(alphabet='{}[]",:1 tnf\\u\n-.e/') | st.text())
def test_a_text_is_refused_exactly_if_the_standard_decoder_refuses_it(text: str) -> None:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        expected = json.loads(text, parse_constant=refuse)
    except ValueError:
        with pytest.raises(InvalidSyntax):
            parse_json(text)
    else:
        assert parse_json(text).root.plain() == expected


def test_json_values_have_line_and_path() -> None:
    root = parse_json('{\n "a": [\n  1,\n  {"b c":\n   2}\n ]\n}').root
    found = [(node.path, node.line) for node in (root, root.find("a"), root.find("a", 0), root.find("a", 1, "b c"))]
    assert found == [("", 1), ("a", 2), ("a[0]", 3), ('a[1]["b c"]', 4)]


@pytest.mark.parametrize("steps", [("x",), (2,), ("a", 5), ("a", -1), ("a", "x")])
def test_find_returns_the_deepest_value_on_the_path(steps: tuple[str | int, ...]) -> None:
    root = parse_json('{"a": [1]}').root
    assert root.find(*steps) is (root.find("a") if steps[0] == "a" else root)


def test_the_first_of_repeated_keys_counts_and_the_others_are_listed() -> None:
    document = parse_json('{"a": 1,\n"b": {"c": 1,\n"c": 2},\n"a": 3}')
    assert document.root.plain() == {"a": 1, "b": {"c": 1}}
    assert [(node.path, node.line, node.value) for node in document.repeated] == [("b.c", 3, 2), ("a", 4, 3)]


@pytest.mark.parametrize(
    ("text", "line", "message", "suggestion"),
    [
        ('{\n"a": 1,\n}', 3, "trailing comma before", "remove the comma"),
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
def test_a_syntax_error_has_line_reason_and_suggestion(text: str, line: int, message: str, suggestion: str) -> None:
    with pytest.raises(InvalidSyntax) as error:
        parse_json(text)
    assert error.value.line == line
    assert message in error.value.message
    assert suggestion in error.value.suggestion


@given(_YAML_VALUES, st.sampled_from([True, False, None]))
def test_yaml_values_are_those_of_the_library_in_every_style(value: Any, flow: bool | None) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert parse_yaml(text).root.plain() == yaml.safe_load(text)


def test_yaml_values_have_line_path_and_text() -> None:
    document = parse_yaml("a:\n  b:\n    - 1\n    - {c: 3.10}\nd e:\n  x\n")
    found = document.root.find("a", "b", 1, "c")
    assert (found.value, found.line, found.path) == (3.1, 4, "a.b[1].c")
    assert found.text == "3.10"
    other = document.root.find("d e")
    assert (other.value, other.line, other.path) == ("x", 5, '["d e"]')


def test_own_keys_override_merged_mappings_in_their_order() -> None:
    text = "one: &one {a: 1, b: 1.0}\ntwo: &two {a: 2, c: 2}\nall:\n  <<: [*one, *two]\n  b: 3.0\n"
    document = parse_yaml(text)
    assert document.repeated == ()
    assert document.root.find("all").plain() == {"a": 1, "b": 3.0, "c": 2} == yaml.safe_load(text)["all"]
    assert document.root.find("all", "b").text == "3.0"


def test_tabs_and_too_many_aliases_are_refused() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    with pytest.raises(InvalidSyntax, match="more than 100000 values"):
        parse_yaml(text)
    text = "a0: &a0 {}\n" + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 8))
    with pytest.raises(InvalidSyntax, match="more than 100000 values"):
        parse_yaml(text)
    with pytest.raises(InvalidSyntax) as caught:
        parse_yaml("a:\n\tb: 1\n")
    assert (caught.value.line, caught.value.suggestion) == (2, "indent with spaces")


@pytest.mark.parametrize(
    "scalar", ["!!bool maybe", "!!timestamp soon", "!!int ''", "!!float ''", "!!int x", "2020-13-45"]
)
def test_a_yaml_scalar_that_does_not_fit_its_tag_has_a_line(scalar: str) -> None:
    with pytest.raises(InvalidSyntax, match="invalid value") as caught:
        parse_yaml(f"a: 1\nb: {scalar}\n")
    assert caught.value.line == 2


@pytest.mark.parametrize("text", ["node {", "a = 1", "[x", 'a: "', "}"])
def test_invalid_proto_text_has_a_line(text: str) -> None:
    with pytest.raises(InvalidSyntax) as caught:
        parse_proto(text)
    assert caught.value.line == 1


def test_names_of_inputs_and_outputs_are_mapped_by_a_file(tmp_path: Path) -> None:
    assert read_mapping(tmp_path) is NO_MAPPING
    (tmp_path / "model.onnx").touch()
    assert read_mapping(tmp_path / "model.onnx") is NO_MAPPING
    (tmp_path / MAPPING_FILE).write_text('{"inputs": {"x:0": "image"}, "outputs": {"y": "label"}}')
    assert read_mapping(tmp_path) == TensorMapping({"x:0": "image"}, {"y": "label"})
    (tmp_path / MAPPING_FILE).write_text('{"outputs": {"y": "label"}}')
    assert read_mapping(tmp_path) == TensorMapping({}, {"y": "label"})


def test_all_problems_of_a_mapping_are_reported(tmp_path: Path) -> None:
    path = tmp_path / MAPPING_FILE
    path.write_text('{"inputs": {"a": "x",\n "b": "x"},\n"output": {},\n"outputs": {"c": 1}}')
    with pytest.raises(ConfigError) as error:
        read_mapping(tmp_path)
    assert [(problem.file, problem.line, problem.path) for problem in error.value.problems] == [
        (str(path), 2, "inputs.b"),
        (str(path), 3, "output"),
        (str(path), 4, "outputs.c"),
    ]
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="the mapping cannot be read: Is a directory"):
        read_mapping(tmp_path)


def _value(kind: Any, value: Any) -> tuple[Any, Findings]:
    reader = Reader(Findings("F"), is_yaml=True)
    return reader.value(with_paths(value), kind), reader.findings


def _text_without_addresses(value: object) -> str:
    return re.sub(r" at 0x\w+", "", str(value))


_PORT = Annotated[int, Field(ge=5, le=9)] | Literal[0]
_COUNT = Annotated[int, Field(ge=1)]
_LENIENT_COUNT = Annotated[int, BeforeValidator(unquoted), Field(ge=1)]
_LENIENT_FLAG = Annotated[bool, BeforeValidator(unquoted)]


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (int, -3, -3),
        (_PORT, 0, 0),
        (Annotated[float, Field(gt=0)], 2, 2.0),
        (bool, False, False),
        (str, "", ""),
        (str | None, None, None),
        (tuple[str, ...], ["a"], ("a",)),
        (Literal["a", "b"], "b", "b"),
        (Annotated[Literal["debug"], BeforeValidator(lower_case)], "Debug", "debug"),
        (_LENIENT_COUNT, "8080", 8080),
        (_LENIENT_COUNT, 8.0, 8),
        (Annotated[float, BeforeValidator(unquoted), Field(gt=0)], "1e-3", 0.001),
        (_LENIENT_FLAG, "Yes", True),
    ],
    ids=_text_without_addresses,
)
def test_a_value_has_the_type_of_its_field(kind: Any, given: Any, value: Any) -> None:
    read, findings = _value(kind, given)
    assert (read, type(read), findings.all) == (value, type(value), ())


@pytest.mark.parametrize(
    ("kind", "given", "expected", "suggestion"),
    [
        (_COUNT, True, "an integer of 1 or more", ""),
        (_PORT, "3", "an integer of 5 to 9 or 0", "remove the quotes"),
        (Annotated[float, Field(gt=0)], float("nan"), "a number above 0", ""),
        (Annotated[float, Field(gt=0, le=9)], 10**400, "a number above 0 and up to 9", ""),
        (Annotated[float, Field(le=9)], 10, "a number of 9 or less", ""),
        (Annotated[str, Field(min_length=1)], "", "a text that is not empty", ""),
        (bool, "true", "true or false", "remove the quotes"),
        (str, 3, "a text", 'put it in quotes: "3"'),
        (tuple[str, ...], "a", "a list of texts", 'write a list: ["a"]'),
        (Literal["grpc", "brpc"], "grcp", "grpc or brpc", "did you mean 'grpc'?"),
        (_LENIENT_COUNT, "soon", "an integer of 1 or more", ""),
        (_LENIENT_COUNT, 1.5, "an integer of 1 or more", ""),
        (_LENIENT_FLAG, 1, "true or false", ""),
    ],
    ids=_text_without_addresses,
)
def test_a_refusal_has_an_expected_form_and_a_suggestion(kind: Any, given: Any, expected: str, suggestion: str) -> None:
    (problem,) = _value(kind, given)[1].all
    assert (problem.expected, problem.suggestion) == (expected, suggestion)
    assert problem.message == "the value cannot be used"


@dataclass(frozen=True)
class _Inner:
    size: _COUNT = 1
    name: Annotated[str, Key()] = ""


class _Outer(Schema):
    count: Annotated[_COUNT, Key("count", "cnt")]
    name: str = ""
    inner: _Inner = _Inner()
    by_name: dict[str, _Inner] = OPTIONAL
    listed: list[_Inner] = OPTIONAL
    old: Annotated[int, NoEffect("replaced by count")] = 0


def _read(text: str, *, is_yaml: bool = True) -> tuple[_Outer | None, Reader]:
    reader = Reader(Findings("F"), is_yaml=is_yaml)
    return reader.read(parse_yaml(text).root, _Outer), reader


def test_nested_schemas_are_read_with_their_defaults() -> None:
    text = "cnt: 2\nold: 3\nname:\ninner: {size: 3}\nby_name: {a: {size: 4}, b: }\nlisted: [{size: 5}]\n"
    read, reader = _read(text)
    by_name = {"a": _Inner(4), "b": _Inner()}
    assert read == _Outer.model_construct(count=2, inner=_Inner(3), by_name=by_name, listed=[_Inner(5)], old=3)
    assert (reader.findings.all, reader.without_effect) == ((), {"old": "replaced by count"})
    assert list(keys_of(_Outer)) == ["count", "cnt", "name", "inner", "by_name", "listed", "old"]
    assert list(keys_of(_Inner)) == ["size"]


class _Loose(BaseModel):
    depth: int = 0


class _User(Schema):
    """Schema of a kind of a user's program, with features of pydantic."""

    base_path: Annotated[str, Field(alias="base-path")]
    size: int = 1
    nested: _Loose = _Loose()

    @field_validator("size")
    @classmethod
    def _even(cls, size: int) -> int:
        if size % 2:
            raise ValueError("an even size")
        return size


def test_a_schema_may_have_aliases_validators_and_models_that_ignore_keys() -> None:
    findings = Findings("F")
    root = parse_json('{"base-path": "a", "size": 2, "nested": {"other": 1}}').root
    members = check_members(root, _User, findings)
    assert (list(members), is_whole(root, members, _User), findings.all) == (["base-path", "size", "nested"], True, ())
    root = parse_json('{"base-path": "a",\n"size": 3}').root
    members = check_members(root, _User, findings)
    assert (list(members), is_whole(root, members, _User)) == (["base-path"], False)
    assert [(each.line, each.path, each.expected, each.found) for each in findings.all] == [
        (2, "size", "an even size", "3")
    ]


def test_all_problems_of_a_mapping_are_reported_by_line() -> None:
    text = "cuont: 3\nname: 4\ninner: {}\nother: 1\nempty:\nby_name: [1]\nlisted: [2]\nold: {}\n"
    read, reader = _read(text)
    assert read is None
    assert [(each.line, each.path, each.message, each.expected, each.severity) for each in reader.findings.all] == [
        (1, "cuont", "the key 'count' is missing", "", "error"),
        (2, "name", "the value cannot be used", "a text", "error"),
        (4, "other", "unknown key 'other', ignored", "", "warning"),
        (5, "empty", "unknown key 'empty', ignored", "", "warning"),
        (6, "by_name", "the value cannot be used", "a mapping of keys to values", "error"),
        (7, "listed[0]", "the value cannot be used", "a mapping of keys to values", "error"),
        (8, "old", "the value cannot be used", "an integer", "error"),
    ]
    assert reader.findings.all[2].suggestion == "known are count, cnt, name, inner, by_name, listed, old"


def test_an_invalid_optional_value_has_its_default_in_yaml_and_invalidates_an_object_of_json() -> None:
    text = "count: 1\nname: 4\n"
    assert _read(text)[0] == _Outer.model_construct(count=1)
    read, reader = _read(text + "nmae: 3\n", is_yaml=False)
    assert read is None
    assert [(each.path, each.suggestion) for each in reader.findings.all] == [
        ("name", 'put it in quotes: "4"'),
        ("nmae", "did you mean 'name'?"),
    ]
