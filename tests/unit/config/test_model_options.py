from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.model_entries import parse_overrides
from ovmstrio.config.model_options import (
    parse_batching,
    parse_color_formats,
    parse_mean,
    parse_model_options,
    parse_plugin_config,
    parse_precisions,
    parse_scale,
    parse_version_policy,
)
from ovmstrio.config.service_options import check_base_path
from ovmstrio.config.shapes import (
    format_batch_size,
    parse_batch_size,
    parse_layout,
    parse_layouts,
    parse_shape,
    parse_shape_buckets,
    parse_shapes,
)
from ovmstrio.config.specs import (
    AllVersions,
    BatchingSpec,
    BatchSpec,
    DimensionBuckets,
    LatestVersions,
    LayoutSpec,
    ModelSpec,
    ShapeSpec,
    SpecificVersions,
    VersionPolicy,
)
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import ANY_SIZE, Dim


def _format_dim(dim: Dim) -> str:
    return format_batch_size(BatchSpec(dim=dim))


def format_numbers(numbers: tuple[float, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"[{','.join(map(str, numbers))}]"


def format_version_policy(policy: VersionPolicy) -> dict[str, Any]:
    if isinstance(policy, LatestVersions):
        return {"latest": {"num_versions": policy.num_versions}}
    return {"all": {}} if isinstance(policy, AllVersions) else {"specific": {"versions": list(policy.versions)}}


def format_shape(shape: ShapeSpec) -> str:
    return "auto" if shape.dims is None else f"({','.join(map(_format_dim, shape.dims))})"


def format_layout(layout: LayoutSpec) -> str:
    return layout.tensor if layout.model is None else f"{layout.tensor}:{layout.model}"


SIZES = st.integers(0, 2**63 - 1)
DIMS = st.just(ANY_SIZE) | st.builds(Dim.fixed, SIZES) | st.tuples(SIZES, SIZES).map(lambda two: Dim(*sorted(two)))
SHAPES = st.just(ShapeSpec(auto=True)) | st.lists(DIMS).map(lambda dims: ShapeSpec(dims=tuple(dims)))
BATCHING = {"max_batch_size": 16, "batch_timeout_ms": 5}
WORDS = {"sizes": [32, 64], "inputs": {"ids": 1, "masks": [1, 2]}}
BUCKETS = {"batch": [4, 16]}
BATCHES = (
    st.none()
    | st.just(BatchSpec(auto=True))
    | DIMS.filter(lambda dim: dim != Dim.fixed(0)).map(lambda dim: BatchSpec(dim=dim))
)
LAYOUTS = st.sampled_from(["NCHW", "NHWC", "N...", "...C", "N?HW", "C", "NC...W", "..."])
LAYOUT_SPECS = st.builds(lambda tensor, model: LayoutSpec(tensor=tensor, model=model), LAYOUTS, st.none() | LAYOUTS)
POLICIES = (
    st.just(AllVersions())
    | st.integers(1, 2**63 - 1).map(lambda number: LatestVersions(num_versions=number))
    | st.lists(st.integers(1, 99), min_size=1).map(lambda versions: SpecificVersions(versions=tuple(versions)))
)
MEANS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1).map(tuple)
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


@pytest.mark.parametrize(
    ("values", "written", "parse"),
    [
        pytest.param(SHAPES, format_shape, partial(parse_shape, "shape"), id="shapes"),
        pytest.param(BATCHES, format_batch_size, parse_batch_size, id="batch sizes"),
        pytest.param(LAYOUT_SPECS, format_layout, partial(parse_layout, "layout"), id="layouts"),
        pytest.param(POLICIES, format_version_policy, parse_version_policy, id="version policies"),
        pytest.param(
            POLICIES, lambda policy: json.dumps(format_version_policy(policy)), parse_version_policy, id="JSON"
        ),
        pytest.param(MEANS, format_numbers, parse_mean, id="means"),
    ],
)
@given(data=st.data())
def test_settings_round_trip(
    values: st.SearchStrategy[Any], written: Callable[[Any], Any], parse: Callable[[Any], Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    assert parse(written(value)) == value


@pytest.mark.parametrize("parse", PARSERS)
@given(value=st.text() | st.text(alphabet='(){}[]":,.-0123456789autoNCHW?') | ANYTHING)
def test_any_value_is_parsed_or_refused_with_option_expected_and_found(parse: Callable[[Any], Any], value: Any) -> None:
    try:
        parse(value)
    except ConfigError as error:
        for problem in error.problems:
            assert problem.path
            assert problem.expected
            assert problem.found


@pytest.mark.parametrize("option", ["batching", "shape_buckets"])
@given(value=st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_objects_without_the_required_keys_are_refused_with_their_path(option: str, value: Any) -> None:
    _, problems = parse_model_options({option: value})
    assert all(problem.path.startswith(option) for problem in problems)
    assert (option == "shape_buckets" and value == {}) == (not problems)


def test_spellings_of_ovms() -> None:
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
    assert parse_color_formats({"x": "BGR:RGB"}) == {"x": "BGR:RGB"}
    assert parse_mean([1, 2.5, 3]) == parse_mean("[1,2.5,3]") == parse_mean("(1, 2.5, 3)") == (1, 2.5, 3)
    assert parse_scale(2) == (2,)
    assert parse_scale("[1,2.5, 3]") == (1, 2.5, 3)
    plugin_config = '{"A": true, "B": 2, "C": 0.5, "D": "x"}'
    assert parse_plugin_config(plugin_config) == {"A": "YES", "B": "2", "C": "0.5", "D": "x"}


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
        (
            parse_version_policy,
            {"specific": {"versions": ["1"]}},
            "model_version_policy.specific.versions[0]",
            "1",
            "remove the quotes",
        ),
        (parse_version_policy, {"all": {"a": 1}}, "model_version_policy.all.a", "", "remove it"),
        (parse_version_policy, {"all": {}, "latest": {}}, "model_version_policy", "all", ""),
        (parse_precisions, "FP23", "precision", "FP32", "did you mean 'FP32'?"),
        (parse_color_formats, "RGB:BRG", "color_format", "NV12:RGB", "did you mean 'RGB'?"),
        (parse_mean, "a", "mean", "127.5", ""),
        (parse_scale, "[1,0]", "scale", "non-zero", ""),
        (parse_plugin_config, {"A": []}, "plugin_config.A", "a number", ""),
        (parse_plugin_config, '{"A": 1, "A": 2}', "plugin_config", "once", ""),
    ],
)
def test_a_refusal_has_an_example_and_a_suggestion(
    parse: Callable[[Any], Any], value: Any, path: str, expected: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse(value)
    (problem,) = error.value.problems
    assert problem.path == path
    assert expected in problem.expected
    assert suggestion in problem.suggestion


@pytest.mark.parametrize(
    ("option", "value", "key", "message"),
    [
        ("batching", 16, "", "an object such as"),
        ("batching", "16", "", "a JSON object"),
        ("batching", {"max_batch_size": 16}, "", "the key 'batch_timeout_ms' is missing"),
        ("batching", {**BATCHING, "max_batchsize": 3}, ".max_batchsize", "did you mean 'max_batch_size'?"),
        ("batching", {**BATCHING, "x": 3}, ".x", "known are max_batch_size, batch_timeout_ms, max_queue_size, eager"),
        ("batching", {**BATCHING, "max_batch_size": 0}, ".max_batch_size", "an integer of 1 to 65536, found 0"),
        ("batching", {**BATCHING, "max_batch_size": True}, ".max_batch_size", "an integer of 1 to 65536, found true"),
        ("batching", {**BATCHING, "batch_timeout_ms": -1}, ".batch_timeout_ms", "a number of 0 to 3600000, found -1"),
        ("batching", {**BATCHING, "batch_timeout_ms": "5"}, ".batch_timeout_ms", 'a number of 0 to 3600000, found "5"'),
        ("batching", {**BATCHING, "batch_timeout_ms": math.nan}, ".batch_timeout_ms", "found NaN"),
        ("batching", {**BATCHING, "eager": 1}, ".eager", "expected true or false, found 1"),
        ("shape_buckets", 16, "", "an object such as"),
        ("shape_buckets", "[1]", "", "a JSON object"),
        ("shape_buckets", {"batch": 4}, ".batch", "a list of sizes such as [1, 4, 16]"),
        ("shape_buckets", {"batch": []}, ".batch.sizes", "expected a list of 1 to 64 items, found []"),
        ("shape_buckets", {"batch": [*range(1, 66)]}, ".batch.sizes", "expected a list of 1 to 64 items"),
        ("shape_buckets", {"batch": [4, 1]}, ".batch.sizes", "sizes are not ascending"),
        ("shape_buckets", {"batch": [4, 4]}, ".batch.sizes", "sizes are not ascending"),
        ("shape_buckets", {"batch": [0, 4]}, ".batch.sizes[0]", "an integer of 1 to 2147483647, found 0"),
        ("shape_buckets", {"batch": [1, True]}, ".batch.sizes[1]", "an integer of 1 to 2147483647, found true"),
        ("shape_buckets", {"batch": {"inputs": {"x": 0}}}, ".batch", "the key 'sizes' is missing"),
        ("shape_buckets", {"batch": {**WORDS, "larger": "cut"}}, ".batch.larger", "refuse or run"),
        ("shape_buckets", {"batch": {**WORDS, "size": [1]}}, ".batch.size", "did you mean 'sizes'?"),
        (
            "shape_buckets",
            {"batch": {**WORDS, "inputs": {"x": -1}}},
            ".batch.inputs.x",
            "an integer of 0 to 64, found -1",
        ),
        ("shape_buckets", {"batch": {**WORDS, "pad": {"x": "0"}}}, ".batch.pad.x", "expected a number"),
        ("shape_buckets", {"batch": {**WORDS, "inputs": ["x"]}}, ".batch.inputs", "expected an object"),
    ],
)
def test_a_refused_object_has_the_path_of_the_wrong_key(option: str, value: Any, key: str, message: str) -> None:
    _, (problem,) = parse_model_options({option: value})
    assert problem.path == f"{option}{key}"
    assert message in str(problem)


def test_usable_options_are_read_with_wrong_ones() -> None:
    fields, problems = parse_model_options({"nireq": 4, "shape": {"a": "x", "b": "y", "c": "(1)"}, "plugin_config": {}})
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
        ({"batching": BATCHING}, {}),
        ({"batching": BATCHING, "shape": "(1,3,8,8)"}, {}),
        ({"batching": BATCHING, "batch_size": 0}, {}),
        ({"batching": BATCHING, "batch_size": "-1"}, {}),
        ({"batching": BATCHING, "batch_size": "1:16"}, {}),
        ({"batching": BATCHING, "batch_size": "1:8"}, {"batch_size": "error"}),
        ({"batching": BATCHING, "batch_size": 4}, {"batch_size": "error"}),
        ({"batching": BATCHING, "batch_size": "auto"}, {"batch_size": "error"}),
        ({"batching": BATCHING, "shape": "auto"}, {"shape": "error"}),
        ({"batching": BATCHING, "shape": {"a": "(1,2)", "b": "auto"}}, {"shape": "error"}),
        ({"batching": BATCHING, "stateful": True}, {"batching": "error"}),
        ({"shape_buckets": BUCKETS}, {}),
        ({"shape_buckets": BUCKETS, "shape": "(-1,8)"}, {}),
        ({"shape_buckets": BUCKETS, "stateful": True}, {"shape_buckets": "error"}),
        ({"shape_buckets": BUCKETS, "shape": "auto"}, {"shape": "error"}),
        ({"shape_buckets": BUCKETS, "batch_size": "auto"}, {"batch_size": "error"}),
        ({"shape_buckets": BUCKETS, "batching": {"max_batch_size": 16, "batch_timeout_ms": 1}}, {}),
        (
            {"shape_buckets": BUCKETS, "batching": {"max_batch_size": 17, "batch_timeout_ms": 1}},
            {"shape_buckets.batch.sizes": "error"},
        ),
        ({"shape_buckets": {"a": [1], "b": [2]}}, {"shape_buckets.b": "error"}),
        (
            {"shape_buckets": {"a": WORDS, "b": {"sizes": [2], "inputs": {"masks": 2}}}},
            {"shape_buckets.b.inputs.masks": "error"},
        ),
    ],
)
def test_options_that_require_or_exclude_each_other(options: dict[str, Any], severities: dict[str, str]) -> None:
    _, problems = parse_model_options(options)
    assert {problem.path: problem.severity for problem in problems} == severities


@pytest.mark.parametrize(
    ("base_path", "is_usable"),
    [
        *((path, False) for path in ("../up", "a/../b", "", "azfs://share/model", "a\0b")),
        *((path, True) for path in ("model", "/models/a..b", "./a/b.onnx")),
    ],
)
def test_base_paths_are_local_and_below_their_directory(base_path: str, is_usable: bool) -> None:
    assert (check_base_path(base_path) == []) == is_usable


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (BATCHING, BatchingSpec(max_batch_size=16, batch_timeout_ms=5)),
        ('{"max_batch_size": 16, "batch_timeout_ms": 0.5}', BatchingSpec(max_batch_size=16, batch_timeout_ms=0.5)),
        (
            {**BATCHING, "max_queue_size": 7, "eager": True},
            BatchingSpec(max_batch_size=16, batch_timeout_ms=5, max_queue_size=7, eager=True),
        ),
    ],
)
def test_batching_is_parsed(value: Any, spec: BatchingSpec) -> None:
    assert parse_batching(value) == spec


def test_all_problems_of_batching_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_batching({"max_batch_size": 0, "eager": "yes"})
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["batching", "batching.max_batch_size", "batching.eager"]


def test_shape_buckets_are_parsed_and_round_trip_through_json() -> None:
    settings = '{"words": {"sizes": [32, 64], "inputs": {"ids": 1, "masks": [1, 2]}, "outputs": {"y": 0}, '
    settings += '"pad": {"ids": 7, "masks": -0.5}, "larger": "run", "warm_up": false}}'
    words = parse_shape_buckets(settings)["words"]
    assert (words.sizes, words.inputs, words.outputs) == ((32, 64), {"ids": (1,), "masks": (1, 2)}, {"y": (0,)})
    assert (words.pad, words.larger, words.warm_up) == ({"ids": 7, "masks": -0.5}, "run", False)
    assert parse_shape_buckets({"batch": [1, 4, 16]}) == {"batch": DimensionBuckets(sizes=(1, 4, 16))}
    spec = ModelSpec(name="m", base_path=Path("m"), shape_buckets=parse_shape_buckets({"batch": [2], "words": WORDS}))
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


def test_load_overrides_take_keys_of_ovms_and_triton() -> None:
    fields, passed_over = parse_overrides(
        '{"name": "m", "platform": "x", "max_batch_size": "8", "nireq": 3,'
        ' "version_policy": {"specific": {"versions": [2]}}, "input": []}'
    )

    assert fields == {
        "batch": BatchSpec(dim=Dim(1, 8)),
        "nireq": 3,
        "version_policy": SpecificVersions(versions=(2,)),
    }
    assert passed_over == ["input", "name", "platform"]
    assert parse_overrides('{"max_batch_size": 0}') == ({}, [])
    with pytest.raises(ConfigError) as error:
        parse_overrides('{"max_batch_size": 1000000, "nireqs": 1, "nireq": -1}')
    assert len(error.value.problems) == 3
