"""Nested lists of a JSON document taken apart into a shape and elements, a level at a time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from ovmstrio.api.kserve.rest.infer_request import TOO_DEEP
from ovmstrio.core.errors import InvalidRequest

__all__ = ["Nested", "unnest"]

MAX_RANK: Final = 98
"""Lists that may lie in each other; the document and its object of inputs are the other two of a hundred levels."""


@dataclass(frozen=True, slots=True)
class Nested:
    """The elements of a value in their order, the Python types that they have, and the shape that the lists gave."""

    shape: tuple[int, ...]
    elements: list[Any]
    kinds: set[type]


def unnest(value: Any) -> Nested | None:
    """Take a value apart; one that is no list has no dimensions.

    None where lists of one level differ in length, or have elements beside them.

    Raises:
        InvalidRequest: the lists lie too deep in each other.
    """
    shape: list[int] = []
    level = [value]
    while list in (kinds := set(map(type, level))):
        sizes = set(map(len, level)) if len(kinds) == 1 else set()
        if len(sizes) != 1:
            return None
        shape.append(sizes.pop())
        if len(shape) > MAX_RANK:
            raise InvalidRequest(f"{TOO_DEEP} - at most {MAX_RANK} lists of a tensor may lie in each other")
        level = list(chain.from_iterable(level))
    return Nested(tuple(shape), level, kinds)
