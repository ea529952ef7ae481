from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.config.model_options import parse_batching, read_model_options
from ovmstrio.config.specs import BatchingSpec
from ovmstrio.core.errors import ConfigError

LEAST = {"max_batch_size": 16, "batch_timeout_ms": 5}


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (LEAST, BatchingSpec(max_batch_size=16, batch_timeout_ms=5)),
        ('{"max_batch_size": 16, "batch_timeout_ms": 0.5}', BatchingSpec(max_batch_size=16, batch_timeout_ms=0.5)),
        (
            {**LEAST, "max_queue_size": 7, "eager": True},
            BatchingSpec(max_batch_size=16, batch_timeout_ms=5, max_queue_size=7, eager=True),
        ),
    ],
)
def test_batching_is_read(value: Any, spec: BatchingSpec) -> None:
    """An object, or a text that holds one; times may have fractions."""
    assert parse_batching(value) == spec


@pytest.mark.parametrize(
    ("value", "path", "told"),
    [
        (16, "batching", "an object such as"),
        ("16", "batching", "a JSON object"),
        ({"max_batch_size": 16}, "batching", "the key 'batch_timeout_ms' is missing"),
        ({**LEAST, "max_batchsize": 3}, "batching.max_batchsize", "did you mean 'max_batch_size'?"),
        ({**LEAST, "x": 3}, "batching.x", "known are max_batch_size, batch_timeout_ms, max_queue_size, eager"),
        ({**LEAST, "max_batch_size": 0}, "batching.max_batch_size", "expected 1 or more, found 0"),
        ({**LEAST, "max_batch_size": True}, "batching.max_batch_size", "expected an integer, found true"),
        ({**LEAST, "batch_timeout_ms": -1}, "batching.batch_timeout_ms", "or more, found -1"),
        ({**LEAST, "batch_timeout_ms": "5"}, "batching.batch_timeout_ms", 'expected a number, found "5"'),
        ({**LEAST, "batch_timeout_ms": math.nan}, "batching.batch_timeout_ms", "found NaN"),
        ({**LEAST, "eager": 1}, "batching.eager", "expected true or false, found 1"),
    ],
)
def test_what_cannot_be_read_is_told(value: Any, path: str, told: str) -> None:
    """The place, what was expected, what came, and the way out."""
    with pytest.raises(ConfigError) as caught:
        parse_batching(value)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert told in str(problem)


def test_everything_wrong_is_told_at_once() -> None:
    """Each key has a problem of its own."""
    with pytest.raises(ConfigError) as caught:
        parse_batching({"max_batch_size": 0, "eager": "yes"})
    assert [problem.path for problem in caught.value.problems] == [
        "batching.max_batch_size",
        "batching",
        "batching.eager",
    ]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.dictionaries(st.text(), x)))
def test_nothing_is_read_otherwise_than_with_problems(value: Any) -> None:
    """Whatever is written, it is refused with a path, as none of it is batching."""
    with pytest.raises(ConfigError) as caught:
        parse_batching(value)
    assert all(problem.path.startswith("batching") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("options", "severities"),
    [
        ({}, {}),
        ({"shape": "(1,3,8,8)"}, {}),
        ({"batch_size": 0}, {}),
        ({"batch_size": "-1"}, {}),
        ({"batch_size": "1:16"}, {}),
        ({"batch_size": "1:8"}, {"batch_size": "error"}),
        ({"batch_size": 4}, {"batch_size": "error"}),
        ({"batch_size": "auto"}, {"batch_size": "error"}),
        ({"shape": "auto"}, {"shape": "error"}),
        ({"shape": {"a": "(1,2)", "b": "auto"}}, {"shape": "error"}),
        ({"stateful": True}, {"batching": "error"}),
    ],
)
def test_options_that_batching_excludes(options: dict[str, Any], severities: dict[str, str]) -> None:
    """What follows each request, has a state, or takes no other batch cannot be joined."""
    fields, problems = read_model_options({"batching": LEAST, **options})
    assert {problem.path: problem.severity for problem in problems} == severities
    assert fields["batching"].max_batch_size == 16
