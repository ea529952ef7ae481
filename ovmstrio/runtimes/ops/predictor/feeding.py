"""From what an Op gives its model to the arrays that the model takes; what does not fit is refused with both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ovmstrio.core.datatypes import BYTES
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.runtimes.ops.predictor.feed_failures import FeedMismatch, FeedTypeError
from ovmstrio.runtimes.ops.predictor.protocol import Feed

__all__ = ["check", "check_fetch", "check_names", "check_types", "prepare"]

_LOD: Final = "lod"


def check_types(feed: Feed) -> None:
    """Refuse values that are neither arrays nor lists of ``str``.

    Raises:
        FeedTypeError: there is one; all are listed.
    """
    wrong = [f"{name!r} is {_type_name(value)}" for name, value in feed.items() if not _is_value(value)]
    if wrong:
        raise FeedTypeError(f"feed values must be numpy.ndarray or list[str], but {', '.join(wrong)}")


def _is_value(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _type_name(value: Any) -> str:
    inner = f"[{type(value[0]).__name__}]" if isinstance(value, list) and value else ""
    return f"{type(value).__name__}{inner}"


def check_names(feed: Feed, expected: Mapping[str, object]) -> None:
    """Refuse a feed with other names than the model's; keys that contain ``lod`` do not count.

    ``expected`` has what messages say of each input, by its name.

    Raises:
        FeedMismatch: a name is missing or left over.
    """
    names = {name for name in feed if _LOD not in name}
    differences = (("missing", expected.keys() - names), ("unknown", names - expected.keys()))
    faults = [f"{title} {sorted(which)}" for title, which in differences if which]
    if faults:
        raise FeedMismatch(f"feed names do not fit the model: {'; '.join(faults)}. {_both(feed, expected)}")


def _both(feed: Feed, expected: Mapping[str, object]) -> str:
    given = ", ".join(f"{name}: {_shown(value)}" for name, value in feed.items()) or "nothing"
    return f"Expected {', '.join(f'{name}: {what}' for name, what in expected.items())}; given {given}"


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} [{','.join(map(str, value.shape))}]"
    return f"{_type_name(value)} of {len(value)}" if isinstance(value, list) else _type_name(value)


def check_fetch(fetch: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that the model does not give.

    Raises:
        FeedMismatch: there is one.
    """
    unknown = sorted(set(fetch) - set(known))
    if unknown:
        raise FeedMismatch(f"fetch names do not fit the model: unknown {unknown}. The model gives {list(known)}")


def check(feed: Feed, expected: Sequence[TensorSpec], *, batch: bool) -> None:
    """Refuse what :func:`prepare` would refuse for names, shapes and kinds of values.

    Raises:
        FeedMismatch: names or shapes do not fit.
        FeedTypeError: a value is neither an array nor a list of ``str``.
    """
    known = {spec.name: spec for spec in expected}
    check_names(feed, known)
    check_types({name: feed[name] for name in known})
    texts = [spec.name for spec in expected if isinstance(feed[spec.name], list) and spec.datatype is not BYTES]
    if texts:
        raise FeedTypeError(f"feed values are texts where the model takes numbers. {_both(feed, known)}")
    before = () if batch else (1,)
    if not all(_fits((*before, *np.shape(feed[spec.name])), spec) for spec in expected):
        lacking = [spec.name for spec in expected if len(before) + np.ndim(feed[spec.name]) + 1 == len(spec.shape)]
        hint = f". Is the batch axis of {', '.join(lacking)} missing?" if lacking else ""
        raise FeedMismatch(f"feed shapes do not fit the model. {_both(feed, known)}{hint}")


def prepare(feed: Feed, expected: Sequence[TensorSpec], *, batch: bool) -> list[Array]:
    """Give the arrays in the order of ``expected``, cast to its types.

    Without ``batch`` an axis of one is put before the values' own.

    Raises:
        FeedMismatch: names or shapes do not fit.
        FeedTypeError: a value is nothing that the model takes.
    """
    check(feed, expected, batch=batch)
    arrays = [_cast(feed[spec.name], spec) for spec in expected]
    return arrays if batch else [array[np.newaxis] for array in arrays]


def _cast(value: Array | list[str], spec: TensorSpec) -> Array:
    if spec.datatype is BYTES:
        flat = [each.encode() if isinstance(each, str) else each for each in np.asarray(value, object).flat]
        strings = np.empty(len(flat), object)
        strings[:] = flat
        return strings.reshape(np.shape(value))
    try:
        return np.ascontiguousarray(value, spec.datatype.numpy).reshape(np.shape(value))
    except (TypeError, ValueError) as error:
        raise FeedTypeError(f"{spec.name!r} is {_shown(value)} and cannot be made {spec}: {error}") from error


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    return len(shape) == len(spec.shape) and all(dim.accepts(size) for dim, size in zip(spec.shape, shape, strict=True))
