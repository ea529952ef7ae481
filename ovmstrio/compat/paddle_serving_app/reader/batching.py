"""Padding of token rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pad_batch_data", "prepare_batch_data"]


def _pad(rows: Sequence[Sequence[int]], length: int, filler: int) -> NDArray[np.int64]:
    """Return the padded rows [rows, length, 1].

    Raises:
        ValueError: a row is longer than ``length``.
    """
    longest = max(map(len, rows), default=0)
    if longest > length:
        raise ValueError(f"max_seq_len is {length}, got {longest} numbers in a row")
    result = np.full((len(rows), length, 1), filler, np.int64)
    for target, row in zip(result, rows, strict=True):
        target[: len(row), 0] = row
    return result


def pad_batch_data(
    insts: Sequence[Sequence[int]],
    pad_idx: int = 0,
    max_seq_len: int = 128,
    return_pos: bool = False,
    return_input_mask: bool = False,
    return_max_len: bool = False,
    return_num_token: bool = False,
    return_seq_lens: bool = False,
) -> Any:
    """Pad rows to ``max_seq_len``.

    Returns:
        INT64 [rows, max_seq_len, 1]; or a list of it and the requested extras: positions and mask of the same shape,
        ``max_seq_len``, the number of tokens, and the row lengths [rows, 1].
    """
    lengths = [len(row) for row in insts]
    results: list[Any] = [_pad(insts, max_seq_len, pad_idx)]
    if return_pos:
        results.append(_pad([range(length) for length in lengths], max_seq_len, pad_idx))
    if return_input_mask:
        results.append(_pad([[1] * length for length in lengths], max_seq_len, 0))
    if return_max_len:
        results.append(max_seq_len)
    if return_num_token:
        results.append(sum(lengths))
    if return_seq_lens:
        results.append(np.array(lengths, np.int64).reshape(-1, 1))
    return results if len(results) > 1 else results[0]


def prepare_batch_data(
    insts: Sequence[Sequence[Any]],
    total_token_num: int,  # noqa: ARG001 - the original's signature
    max_seq_len: int = 128,
    pad_id: int = 0,
    **_: Any,
) -> list[NDArray[Any]]:
    """Pad a batch of (tokens, sentences, positions, labels ...) to ``max_seq_len``.

    Returns:
        Tokens, positions, sentences and mask, each INT64 [rows, max_seq_len, 1], and labels [rows, 1].
    """
    tokens, sentences, positions, *labels = zip(*insts, strict=True)
    filled = [_pad(rows, max_seq_len, pad_id) for rows in (tokens, positions, sentences)]
    mask = _pad([[1] * len(row) for row in tokens], max_seq_len, 0)
    return [*filled, mask, *(np.array(column, np.int64).reshape(-1, 1) for column in labels)]
