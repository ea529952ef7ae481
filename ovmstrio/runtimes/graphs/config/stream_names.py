"""How streams are named: ``name``, ``TAG:name`` and ``TAG:index:name``; ``TAG`` and ``TAG:index`` where only a port is.

Tags are upper case and names lower case, so that neither is taken for the other.
"""

from __future__ import annotations

import re
from typing import Final

from ovmstrio.runtimes.graphs.config.graph_config import Port

__all__ = ["InvalidName", "is_stream_name", "parse_stream", "parse_tag_index", "raw_name"]

_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*")
_TAG: Final = re.compile(r"[A-Z_][A-Z0-9_]*")
_INDEX: Final = re.compile(r"0|[1-9][0-9]*")
_HIGHEST_INDEX: Final = 10_000


class InvalidName(ValueError):
    """A stream or port is not written as it must be; ``expected`` says how, ``fix`` what would do."""

    def __init__(self, message: str, expected: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.expected = expected
        self.fix = fix


def is_stream_name(text: str) -> bool:
    """Tell whether a text may be the name of a stream or side packet."""
    return _NAME.fullmatch(text) is not None


def raw_name(text: str) -> str:
    """Give the part after the last colon, whatever it is."""
    return text.rpartition(":")[2]


def parse_stream(text: str) -> tuple[str | None, int, str]:
    """Split a stream into tag, index and name; the tag is None where there is none.

    Raises:
        InvalidName: it is not written like one.
    """
    parts = text.split(":")
    if len(parts) > 3:  # noqa: PLR2004 - tag, index, name
        raise InvalidName(f'"{text}" has {len(parts)} parts', "name, TAG:name or TAG:index:name")
    *place, name = parts
    tag = _checked_tag(place[0], text) if place else None
    index = _checked_index(place[1], text) if len(place) > 1 else 0
    if not is_stream_name(name):
        raise InvalidName(
            f'"{name}" in "{text}" is no name of a stream',
            "lower-case letters, digits and _, no digit first",
            _spelt(name, name.lower()),
        )
    return tag, index, name


def parse_tag_index(text: str) -> Port:
    """Read a port as ``input_stream_info`` and ``sync_set`` name it: ``TAG``, ``TAG:2``, ``:1``, or nothing at all.

    Raises:
        InvalidName: it is not written like one.
    """
    tag, colon, index = text.partition(":")
    return Port(_checked_tag(tag, text) if tag else "", _checked_index(index, text) if colon else 0)


def _checked_tag(tag: str, text: str) -> str:
    if not _TAG.fullmatch(tag):
        raise InvalidName(
            f'"{tag}" in "{text}" is no tag',
            "upper-case letters, digits and _, no digit first",
            _spelt(tag, tag.upper()),
        )
    return tag


def _checked_index(index: str, text: str) -> int:
    # A bound, for the digits of a hostile file would take very long to be read as a number.
    if not _INDEX.fullmatch(index) or len(index) > len(str(_HIGHEST_INDEX)) or int(index) > _HIGHEST_INDEX:
        raise InvalidName(f'"{index}" in "{text}" is no index', f"a number from 0 to {_HIGHEST_INDEX}")
    return int(index)


def _spelt(found: str, better: str) -> str:
    fits = _NAME.fullmatch(better) or _TAG.fullmatch(better)
    return f"write {better!r}" if fits and better != found else ""
