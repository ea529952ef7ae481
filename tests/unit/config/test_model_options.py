from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.model_options import (
    check_base_path,
    format_version_policy,
    parse_plugin_config,
    parse_version_policy,
    read_model_options,
)
from ovmstrio.config.preprocessing import (
    format_numbers,
    parse_color_formats,
    parse_mean,
    parse_precisions,
    parse_scale,
)
from ovmstrio.config.shapes import (
    format_batch_size,
    format_layout,
    format_shape,
    parse_batch_size,
    parse_layout,
    parse_layouts,
    parse_shape,
    parse_shapes,
)
from ovmstrio.config.specs import (
    AllVersions,
    BatchSpec,
    LatestVersions,
    LayoutSpec,
    ShapeSpec,
    SpecificVersions,
)
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import ANY_SIZE, Dim

SIZES = st.integers(0, 2**63 - 1)
DIMS = st.just(ANY_SIZE) | st.builds(Dim.fixed, SIZES) | st.tuples(SIZES, SIZES).map(lambda two: Dim(*sorted(two)))
SHAPES = st.just(ShapeSpec(auto=True)) | st.lists(DIMS).map(lambda dims: ShapeSpec(dims=tuple(dims)))
BATCHES = (
    st.none()
    | st.just(BatchSpec(auto=True))
    | DIMS.filter(lambda dim: dim != Dim.fixed(0)).map(lambda dim: BatchSpec(dim=dim))
)
LAYOUTS = st.sampled_from(["NCHW", "NHWC", "N...", "...C", "N?HW", "C", "NC...W", "..."])
PARSERS: list[Callable[[Any], Any]] = [
    parse_batch_size,
    parse_shapes,
    parse_layouts,
    parse_version_policy,
    parse_precisions,
    parse_color_formats,
    parse_mean,
    parse_scale,
    parse_plugin_config,
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(SHAPES)
def test_shapes_are_read_as_they_are_written(shape: ShapeSpec) -> None:
    """Fixed sizes, ranges, any size and auto survive."""
    assert parse_shape("shape", format_shape(shape)) == shape


@given(BATCHES)
def test_batch_sizes_are_read_as_they_are_written(batch: BatchSpec | None) -> None:
    """Sizes, ranges, auto, and 0 for the model's own survive."""
    assert parse_batch_size(format_batch_size(batch)) == batch


@given(LAYOUTS, st.none() | LAYOUTS)
def test_layouts_are_read_as_they_are_written(tensor: str, model: str | None) -> None:
    """One layout and two survive."""
    layout = LayoutSpec(tensor=tensor, model=model)
    assert parse_layout("layout", format_layout(layout)) == layout


@given(
    st.just(AllVersions())
    | st.integers(1, 2**63 - 1).map(lambda number: LatestVersions(num_versions=number))
    | st.lists(st.integers(1, 99), min_size=1).map(lambda versions: SpecificVersions(versions=tuple(versions)))
)
def test_policies_are_read_as_they_are_written(policy: Any) -> None:
    """As an object, and as a text on the command line."""
    written = format_version_policy(policy)
    assert parse_version_policy(written) == policy
    assert parse_version_policy(json.dumps(written)) == policy


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_means_are_read_as_they_are_written(numbers: list[float]) -> None:
    """Every digit survives."""
    assert parse_mean(format_numbers(tuple(numbers))) == tuple(numbers)


@pytest.mark.parametrize("parse", PARSERS)
@given(value=st.text() | st.text(alphabet='(){}[]":,.-0123456789autoNCHW?') | ANYTHING)
def test_nothing_that_a_user_writes_fails_otherwise_than_with_a_problem(
    parse: Callable[[Any], Any], value: Any
) -> None:
    """Any text and any JSON is read or refused; a refusal names option, found and expected."""
    try:
        parse(value)
    except ConfigError as error:
        for problem in error.problems:
            assert problem.path
            assert problem.expected
            assert problem.found


def test_spellings_of_ovms() -> None:
    """Blanks, single options, options by tensor, and objects in texts mean what they mean to OVMS."""
    assert parse_shapes(" ( 1, -1 ,2:8 ) ") == {"": ShapeSpec(dims=(Dim(1, 1), ANY_SIZE, Dim(2, 8)))}
    assert parse_shapes("(10,)") == {"": ShapeSpec(dims=(Dim(10, 10),))}
    assert parse_shapes({"a": "auto", "b": "()"}) == {"a": ShapeSpec(auto=True), "b": ShapeSpec(dims=())}
    assert parse_shapes('{"a": "AUTO"}') == {"a": ShapeSpec(auto=True)}
    assert parse_layouts({"a": "nhwc:nchw"}) == {"a": LayoutSpec(tensor="NHWC", model="NCHW")}
    assert parse_batch_size(8) == parse_batch_size("8") == BatchSpec(dim=Dim(8, 8))
    assert parse_batch_size("-1") == BatchSpec(dim=ANY_SIZE)
    assert parse_batch_size(0) is None
    assert parse_version_policy({"latest": {}}) == LatestVersions(num_versions=1)
    assert parse_precisions("fp32") == {"": "FP32"}
    assert parse_precisions("in:U8") == {"in": "UINT8"}
    assert parse_precisions("uint8:fp32") == {"": "UINT8"}
    assert parse_precisions('{"a": "uint8:fp32", "b": "fp16:fp32"}') == {"a": "UINT8", "b": "FP16"}
    assert parse_precisions('{"x:0": "I64"}') == {"x:0": "INT64"}
    assert parse_color_formats("nv12:RGB") == {"": "NV12:RGB"}
    assert parse_scale("[1,2.5, 3]") == (1, 2.5, 3)
    assert parse_plugin_config('{"A": true, "B": 2, "C": 0.5, "D": "x"}') == {
        "A": "YES",
        "B": "2",
        "C": "0.5",
        "D": "x",
    }


@pytest.mark.parametrize(
    ("parse", "value", "path", "expected", "suggestion"),
    [
        (parse_shapes, "1,3", "shape", "(1,3,224,224)", "write (1,3)"),
        (parse_shapes, {"a": "(8:2)"}, "shape.a", "(1,3,224,224)", ""),
        (parse_shapes, "(99999999999999999999)", "shape", "(1,3,224,224)", ""),
        (parse_batch_size, "eight", "batch_size", "2:8", "the model's own"),
        (parse_layouts, "NCHWN", "layout", "NHWC:NCHW", ""),
        (parse_version_policy, {"lates": {}}, "model_version_policy", "num_versions", "did you mean 'latest'?"),
        (parse_version_policy, {"latest": {"num_version": 1}}, "model_version_policy.latest.num_version", "", "mean"),
        (parse_version_policy, {"latest": {"num_versions": 0}}, "model_version_policy.latest.num_versions", "1", ""),
        (parse_version_policy, {"specific": {"versions": ["1"]}}, "model_version_policy.specific.versions", "[1", ""),
        (parse_version_policy, {"all": {"a": 1}}, "model_version_policy.all", "empty", ""),
        (parse_version_policy, {"all": {}, "latest": {}}, "model_version_policy", "all", ""),
        (parse_precisions, "FP23", "precision", "FP32", "did you mean 'FP32'?"),
        (parse_color_formats, "RGB:BRG", "color_format", "NV12:RGB", "did you mean 'RGB'?"),
        (parse_mean, "a", "mean", "127.5", ""),
        (parse_scale, "[1,0]", "scale", "other than 0", ""),
        (parse_plugin_config, {"A": []}, "plugin_config.A", "a number", ""),
        (parse_plugin_config, '{"A": 1, "A": 2}', "plugin_config", "once", ""),
    ],
)
def test_what_is_wrong_is_said_with_an_example(
    parse: Callable[[Any], Any], value: Any, path: str, expected: str, suggestion: str
) -> None:
    """A refusal shows the right form and, for a near miss, the right word."""
    with pytest.raises(ConfigError) as error:
        parse(value)
    (problem,) = error.value.problems
    assert problem.path == path
    assert expected in problem.expected
    assert suggestion in problem.suggestion


def test_all_options_are_read_whatever_is_wrong_with_others() -> None:
    """Good options become fields, bad ones problems, each of them."""
    fields, problems = read_model_options({"nireq": 4, "shape": {"a": "x", "b": "y", "c": "(1)"}, "plugin_config": {}})
    assert fields == {"nireq": 4, "plugin_config": {}}
    assert [problem.path for problem in problems] == ["shape.a", "shape.b"]


@pytest.mark.parametrize(
    ("options", "severities"),
    [
        ({"max_sequence_number": 3}, {"max_sequence_number": "error"}),
        ({"stateful": False, "idle_sequence_cleanup": True}, {"idle_sequence_cleanup": "error"}),
        ({"sequence_migration": True}, {"sequence_migration": "error"}),
        ({"stateful": True, "max_sequence_number": 3, "sequence_migration": False}, {}),
        ({"stateful": True, "batch_size": "auto"}, {"batch_size": "error"}),
        ({"stateful": True, "shape": "auto"}, {"shape": "error"}),
        ({"batch_size": 1, "shape": "(1)"}, {"batch_size": "warning"}),
        ({"batch_size": "many"}, {"batch_size": "warning"}),
        ({"mean": "1", "precision": "FP32"}, {"precision": "error", "mean": "error"}),
        ({"mean": "1", "precision": "FP32", "layout": "N..."}, {}),
        ({"nireq": 100_001}, {"nireq": "error"}),
        ({"stateful": True, "max_sequence_number": 2**32}, {"max_sequence_number": "error"}),
    ],
)
def test_options_that_need_or_exclude_each_other(options: dict[str, Any], severities: dict[str, str]) -> None:
    """Only what OVMS passes over is a warning."""
    _, problems = read_model_options(options)
    assert {problem.path: problem.severity for problem in problems} == severities


@pytest.mark.parametrize("base_path", ["../up", "a/../b", "", "s3://bucket/model", "azfs://share/model", "a\0b"])
def test_paths_that_cannot_be_served(base_path: str) -> None:
    """Ways out of the repository, remote storage and nonsense are refused by their spelling."""
    assert check_base_path(base_path)


@pytest.mark.parametrize("base_path", ["model", "/models/a..b", "./a/b.onnx"])
def test_paths_that_can(base_path: str) -> None:
    """Dots in names are no way out."""
    assert check_base_path(base_path) == []
