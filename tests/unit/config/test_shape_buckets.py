from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.model_options import read_model_options
from ovmstrio.config.shape_buckets import parse_shape_buckets
from ovmstrio.config.specs import BucketedDimension, ModelSpec
from ovmstrio.core.errors import ConfigError

WORDS = {"sizes": [32, 64], "inputs": {"ids": 1, "masks": [1, 2]}}


def test_a_list_is_sizes_of_the_batch_dimension() -> None:
    """No inputs stand for all of them."""
    assert parse_shape_buckets({"batch": [1, 4, 16]}) == {"batch": BucketedDimension(sizes=(1, 4, 16))}


def test_a_dimension_is_read_with_all_that_it_may_say() -> None:
    """One position stands for a list of one, and a text may hold the object."""
    settings = '{"words": {"sizes": [32, 64], "inputs": {"ids": 1, "masks": [1, 2]}, "outputs": {"y": 0}, '
    settings += '"pad": {"ids": 7, "masks": -0.5}, "larger": "run", "warm_up": false}}'
    words = parse_shape_buckets(settings)["words"]
    assert (words.sizes, words.inputs, words.outputs) == ((32, 64), {"ids": (1,), "masks": (1, 2)}, {"y": (0,)})
    assert (words.pad, words.larger, words.warm_up) == ({"ids": 7, "masks": -0.5}, "run", False)


def test_settings_are_the_same_behind_json() -> None:
    """A worker process that tries the model gets them so."""
    spec = ModelSpec(name="m", base_path=Path("m"), shape_buckets=parse_shape_buckets({"batch": [2], "words": WORDS}))
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("value", "path", "told"),
    [
        (16, "", "an object such as"),
        ("[1]", "", "a JSON object"),
        ({"batch": 4}, ".batch", "a list of sizes such as [1, 4, 16]"),
        ({"batch": []}, ".batch.sizes", "expected a list that is not empty, found []"),
        ({"batch": [*range(1, 66)]}, ".batch.sizes", "expected no more than 64 sizes"),
        ({"batch": [4, 1]}, ".batch.sizes", "the sizes do not ascend"),
        ({"batch": [4, 4]}, ".batch.sizes", "the sizes do not ascend"),
        ({"batch": [0, 4]}, ".batch.sizes", "expected 1 or more, found 0"),
        ({"batch": [1, True]}, ".batch.sizes", "expected an integer, found true"),
        ({"batch": {"inputs": {"x": 0}}}, ".batch", "the key 'sizes' is missing"),
        ({"batch": {**WORDS, "larger": "cut"}}, ".batch.larger", "'refuse' or 'run'"),
        ({"batch": {**WORDS, "size": [1]}}, ".batch.size", "did you mean 'sizes'?"),
        ({"batch": {**WORDS, "inputs": {"x": -1}}}, ".batch.inputs.x", "expected 0 or more, found -1"),
        ({"batch": {**WORDS, "pad": {"x": "0"}}}, ".batch.pad.x", "expected a number"),
        ({"batch": {**WORDS, "inputs": ["x"]}}, ".batch.inputs", "expected an object"),
    ],
)
def test_what_cannot_be_read_is_told(value: Any, path: str, told: str) -> None:
    """The place, what was expected, what came, and the way out."""
    with pytest.raises(ConfigError) as caught:
        parse_shape_buckets(value)
    (problem,) = caught.value.problems
    assert problem.path == f"shape_buckets{path}"
    assert told in str(problem)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_whatever_is_written_is_read_or_refused_with_a_path(value: Any) -> None:
    """Nothing else is raised, and each problem has its place."""
    _, problems = read_model_options({"shape_buckets": value})
    assert all(problem.path.startswith("shape_buckets") for problem in problems)
    assert (value == {}) == (not problems)


@pytest.mark.parametrize(
    ("options", "paths"),
    [
        ({}, []),
        ({"shape": "(-1,8)"}, []),
        ({"stateful": True}, ["shape_buckets"]),
        ({"shape": "auto"}, ["shape"]),
        ({"batch_size": "auto"}, ["batch_size"]),
        ({"batching": {"max_batch_size": 16, "batch_timeout_ms": 1}}, []),
        ({"batching": {"max_batch_size": 17, "batch_timeout_ms": 1}}, ["shape_buckets.batch.sizes"]),
    ],
)
def test_options_that_buckets_exclude(options: dict[str, Any], paths: list[str]) -> None:
    """What has a state, follows each request, or joins more than the largest bucket."""
    _, problems = read_model_options({"shape_buckets": {"batch": [4, 16]}, **options})
    assert [problem.path for problem in problems] == paths


@pytest.mark.parametrize(
    ("buckets", "path"),
    [
        ({"a": [1], "b": [2]}, "shape_buckets.b"),
        ({"a": WORDS, "b": {"sizes": [2], "inputs": {"masks": 2}}}, "shape_buckets.b.inputs.masks"),
    ],
)
def test_a_dimension_of_an_input_has_one_set_of_buckets(buckets: Any, path: str) -> None:
    """Two would contradict each other."""
    _, problems = read_model_options({"shape_buckets": buckets})
    assert [problem.path for problem in problems] == [path]
