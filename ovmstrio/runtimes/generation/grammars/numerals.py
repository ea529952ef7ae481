"""Numbers within bounds, as parts of a grammar's rule."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["INTEGER", "NUMBER", "integers", "numbers", "whole"]

_MOST: Final = 10**15 - 1
"""Numbers have so many digits at most, that every reader of JSON reads them as they are; more would never end."""

INTEGER: Final = '"-"? ("0" | [1-9] [0-9]{0,14})'
NUMBER: Final = f'{INTEGER} ("." [0-9]{{1,15}})? ([eE] [+-]? [0-9]{{1,2}})?'
_FRACTION: Final = '("." [0-9]{1,15})?'
_NO_FRACTION: Final = '("." "0"{1,15})?'
_SOME_FRACTION: Final = '"." [0-9]{0,14} [1-9]'


def integers(least: int | None, most: int | None) -> str:
    """Give the numerals of all whole numbers from ``least`` to ``most``, None for no bound."""
    low, high = _within(least, -_MOST, most), _within(most, _MOST, least)
    if (low, high) == (-_MOST, _MOST):
        return INTEGER
    parts = []
    if low < 0:
        parts.append(f'"-" ({_numerals(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_numerals(max(low, 0), high))
    return " | ".join(parts)


def numbers(least: int | None, most: int | None, *, above: bool = False, below: bool = False) -> str:
    """Give the numerals of all numbers from ``least`` to ``most``, themselves left out by ``above``, ``below``."""
    low, high = _within(least, -_MOST, most), _within(most, _MOST, least)
    parts = []
    if low < 0:
        # What is above a bound below zero is, without its sign, below it.
        end = max(0, -high)
        parts.append(f'"-" ({_positive(end, -low, above=end == 0 or (below and -high == end), below=above)})')
    if high > 0 or (high == 0 and not below):
        start = max(low, 0)
        parts.append(_positive(start, high, above=above and low == start, below=below))
    return " | ".join(parts)


def whole(value: Any) -> int | None:
    """Give a bound that is a whole number; None for another."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return int(value) if is_whole else None


def _within(bound: int | None, usual: int, other: int | None) -> int:
    if bound is not None:
        return bound
    return usual if other is None else (min(usual, other) if usual < 0 else max(usual, other))


def _positive(low: int, high: int, *, above: bool, below: bool) -> str:
    """Give the numerals of numbers from ``low``, at least 0, to ``high``."""
    parts = []
    if low < high:
        # Whole parts from the least on have any fraction, but for the least itself where it is left out.
        first = low + 1 if above else low
        if above:
            parts.append(f'"{low}" {_SOME_FRACTION}')
        if first < high:
            parts.append(f"({_numerals(first, high - 1)}) {_FRACTION}")
    if not below and not (above and low == high):
        parts.append(f'"{high}" {_NO_FRACTION}')
    return " | ".join(parts)


def _numerals(low: int, high: int) -> str:
    """Give the numerals of whole numbers from ``low``, at least 0, to ``high``."""
    parts = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts += _same_length(str(low), str(last))
        low = last + 1
    return " | ".join(parts)


def _same_length(low: str, high: str) -> list[str]:
    """Give the numerals of as many digits as both have, from one to the other."""
    if not low:
        return ['""']
    rest = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [_digits(low[0], high[0]) + _any_digits(rest)]
    if low[0] == high[0]:
        return [f'"{low[0]}" ({" | ".join(_same_length(low[1:], high[1:]))})']
    first, last = int(low[0]), int(high[0])
    parts = [f'"{first}" ({" | ".join(_same_length(low[1:], "9" * rest))})']
    if first + 1 < last:
        parts.append(_digits(str(first + 1), str(last - 1)) + _any_digits(rest))
    return [*parts, f'"{last}" ({" | ".join(_same_length("0" * rest, high[1:]))})']


def _digits(first: str, last: str) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _any_digits(count: int) -> str:
    return f" [0-9]{{{count}}}" if count else ""
