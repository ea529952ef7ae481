"""Feeds of several samples as one, with their rows behind each other, and the outputs of one as those of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ovmstrio.runtimes.ops.tensors import LOD_SUFFIX

__all__ = ["kind_of", "merge", "rows_of", "split"]

Feed = Mapping[str, Any]


def kind_of(feed: Feed) -> Hashable | None:
    """Tell with which feeds this one can be merged: those of the same kind; None if with none.

    Those have the same names, types and shapes but for the rows, of which every value has the same number.
    """
    if not all(isinstance(name, str) for name in feed):
        return None
    rows = {name: _rows(value) for name, value in feed.items() if not name.endswith(LOD_SUFFIX)}
    if len(set(rows.values())) != 1 or None in rows.values() or len(rows) != len(feed):
        return None
    return frozenset((name, *_type_of(value)) for name, value in feed.items())


def _rows(value: Any) -> int | None:
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _type_of(value: Any) -> tuple[Any, ...]:
    return (value.dtype.str, value.shape[1:]) if isinstance(value, np.ndarray) else ("list",)


def rows_of(feed: Feed) -> int:
    """Tell how many rows a feed has that can be merged."""
    return len(next(iter(feed.values())))


def merge(feeds: Sequence[Feed]) -> dict[str, Any]:
    """Put feeds of the same kind behind each other."""
    return {name: _behind_each_other([feed[name] for feed in feeds]) for name in feeds[0]}


def _behind_each_other(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    return np.concatenate(values)


def split(outputs: Mapping[str, Any], rows: Sequence[int]) -> list[dict[str, Any]] | None:
    """Give each sample its rows of every output; None if an output does not have as many rows as were fed.

    Where an output has row offsets, an entry of theirs stands for one row that was fed.
    """
    ends = np.cumsum(rows).tolist()
    starts = [0, *ends[:-1]]
    total = ends[-1]
    for name, value in outputs.items():
        offsets = outputs.get(name + LOD_SUFFIX)
        if name.endswith(LOD_SUFFIX) and name.removesuffix(LOD_SUFFIX) in outputs:
            continue
        if (len(offsets) - 1 if offsets is not None else _rows(value)) != total:
            return None
    return [_part(outputs, start, end) for start, end in zip(starts, ends, strict=True)]


def _part(outputs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for name, value in outputs.items():
        if name in part:
            continue
        offsets = outputs.get(name + LOD_SUFFIX)
        if offsets is None:
            part[name] = value[start:end]
        else:
            part[name] = value[int(offsets[start]) : int(offsets[end])]
            part[name + LOD_SUFFIX] = offsets[start : end + 1] - offsets[start]
    return part
