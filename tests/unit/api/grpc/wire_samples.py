"""Messages, mutilated messages and garbage for tests of the codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from ovmstrio.core.datatypes import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["mutations", "request_fields", "texts"]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

_parameters = st.dictionaries(
    texts,
    st.one_of(
        st.just({}),
        st.booleans().map(lambda value: {"bool_param": value}),
        st.integers(-(2**63), 2**63 - 1).map(lambda value: {"int64_param": value}),
        st.integers(0, 2**64 - 1).map(lambda value: {"uint64_param": value}),
        st.floats(allow_nan=False).map(lambda value: {"double_param": value}),
        texts.map(lambda value: {"string_param": value}),
    ),
    max_size=3,
)


def _elements(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    few = st.lists(strategy, min_size=1, max_size=4)
    return st.one_of(few, st.tuples(few, st.integers(20, 60)).map(lambda pair: pair[0] * pair[1]))


_contents = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": _elements(st.booleans()),
        "int_contents": _elements(st.integers(-(2**31), 2**31 - 1)),
        "int64_contents": _elements(st.integers(-(2**63), 2**63 - 1)),
        "uint_contents": _elements(st.integers(0, 2**32 - 1)),
        "uint64_contents": _elements(st.integers(0, 2**64 - 1)),
        "fp32_contents": _elements(st.floats(width=32, allow_nan=False)),
        "fp64_contents": _elements(st.floats(allow_nan=False)),
        "bytes_contents": _elements(st.binary(max_size=9)),
    },
)

_inputs = st.fixed_dictionaries(
    {
        "name": texts,
        "datatype": st.one_of(st.sampled_from(sorted(BY_NAME)), texts),
        "shape": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
        "parameters": _parameters,
    },
    optional={"contents": _contents},
)

request_fields = st.fixed_dictionaries(
    {
        "model_name": texts,
        "model_version": texts,
        "id": texts,
        "parameters": _parameters,
        "inputs": st.lists(_inputs, max_size=3),
        "outputs": st.lists(st.fixed_dictionaries({"name": texts, "parameters": _parameters}), max_size=3),
        "raw_input_contents": st.lists(
            st.one_of(st.binary(max_size=50), st.integers(30_000, 40_000).map(lambda size: b"\x3a\x05" * (size // 2))),
            max_size=3,
        ),
    }
)
"""The fields of a ``ModelInferRequest``, as keyword arguments of Google's classes; about half make large messages."""


def _cut(data: bytes, start: int, end: int, extra: bytes) -> bytes:
    return data[: start % (len(data) + 1)] + extra + data[end % (len(data) + 1) :]


def mutations(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Replace a random stretch of a message by random bytes, at its start more often than elsewhere."""
    position = st.one_of(st.integers(0, 80), st.integers(0, 100_000))
    change: Callable[..., bytes] = _cut
    return st.builds(change, messages, position, position, st.binary(max_size=12))
