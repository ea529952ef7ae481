"""Lines of what protobuf's parser has read: the tree of the same text, asked by field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ovmstrio.runtimes.graphs.config.syntax import Block, Entry, Value

__all__ = ["Place", "first_block", "line_of", "lines_of", "places_of"]


class Place:
    """A message of the file: its fields as written, and the line where it begins."""

    __slots__ = ("entries", "line")

    def __init__(self, entries: Sequence[Entry], line: int) -> None:
        self.entries = entries
        self.line = line


def _values(place: Place, name: str) -> Iterator[tuple[Entry, Value]]:
    for entry in place.entries:
        if entry.name == name:
            for value in entry.values:
                yield entry, value


def lines_of(place: Place, name: str) -> list[int]:
    """Give the line of each value of a field, in the order of the file."""
    return [value.line for _, value in _values(place, name)]


def line_of(place: Place, name: str) -> int:
    """Give the line of a field, or where its message begins if it is not there."""
    return next(iter(lines_of(place, name)), place.line)


def places_of(place: Place, name: str) -> list[Place]:
    """Give the messages of a field, each beginning where its name is written (or its brace, in a list)."""
    return [
        Place(value.entries, value.line if entry.is_list else entry.line)
        for entry, value in _values(place, name)
        if isinstance(value, Block)
    ]


def first_block(place: Place, *names: str) -> Place:
    """Go down by fields, as far as they are there."""
    for name in names:
        inner = places_of(place, name)
        if not inner:
            return Place((), place.line)
        place = inner[0]
    return place
