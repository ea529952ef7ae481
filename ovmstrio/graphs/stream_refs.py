"""Tags, indexes and names of streams in graph files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ovmstrio.config.documents import Findings, InvalidValue, Located
from ovmstrio.graphs.graph_config import INITIALIZATION, Port, StreamRef

_INPUT_NAME: Final = "Mediapipe unexpected input stream packets name"
_OUTPUT_NAME: Final = "Mediapipe unexpected output stream packets name"
_SIDE_NAME: Final = "Mediapipe unexpected input side packet stream name"


_GRAPH_TEXTS = {
    "input_stream": _INPUT_NAME,
    "output_stream": _OUTPUT_NAME,
    "input_side_packet": _SIDE_NAME,
    "output_side_packet": _SIDE_NAME,
}


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Parser of the streams of one node or of the graph."""

    findings: Findings
    is_graph: bool = False

    def read(self, kind: str, texts: Sequence[str], places: Sequence[Located]) -> tuple[StreamRef, ...]:
        """Return the valid streams of the field ``kind`` and report the others."""
        found: dict[Port, StreamRef] = {}
        untagged = 0
        for text, at in zip(texts, places, strict=True):
            try:
                tag, index, name = parse_stream(text)
            except InvalidValue as error:
                is_empty = self.is_graph and not text.rpartition(":")[2]
                base = _GRAPH_TEXTS[kind] if is_empty else INITIALIZATION
                report_invalid_name(self.findings, at, error, text, base)
                continue
            if tag is None:
                index, untagged = untagged, untagged + 1
            self._add(found, StreamRef(Port(tag or "", index), name, at))
        self._check_dense(found)
        if self.is_graph:
            self._check_repeated(_GRAPH_TEXTS[kind], found.values())
        return tuple(found.values())

    def _add(self, found: dict[Port, StreamRef], ref: StreamRef) -> None:
        other = found.setdefault(ref.port, ref)
        if other is not ref:
            self._refuse(
                ref,
                f'{INITIALIZATION} - FAILED_PRECONDITION: tag "{ref.port.tag}" index {ref.port.index} already had a '
                f'name "{other.name}" but is being reassigned a name "{ref.name}"',
                f"use another tag; line {other.line} has this one",
            )

    def _check_dense(self, found: dict[Port, StreamRef]) -> None:
        for ref in found.values():
            below = Port(ref.port.tag, ref.port.index - 1)
            if ref.port.index and below not in found:
                self._refuse(
                    ref,
                    f"{INITIALIZATION} - FAILED_PRECONDITION: Not all indexes were assigned names: tag "
                    f'"{ref.port.tag}" has index {ref.port.index} and no {below.index}',
                    "count the indexes of a tag from 0 without gaps",
                )

    def _check_repeated(self, base: str, refs: Iterable[StreamRef]) -> None:
        first: dict[str, StreamRef] = {}
        for ref in refs:
            other = first.setdefault(ref.name, ref)
            if other is not ref:
                fix = f"use another name; line {other.line} has this one"
                self._refuse(ref, f'{base} - duplicate name "{ref.name}"', fix)

    def _refuse(self, ref: StreamRef, message: str, fix: str) -> None:
        self.findings.refuse(ref.at, message, suggestion=fix)


def report_invalid_name(
    findings: Findings, at: Located, error: InvalidValue, text: str, base: str = INITIALIZATION
) -> None:
    """Report an invalid stream or port."""
    findings.refuse_value(at, error, text or "nothing", f"{base} - INVALID_ARGUMENT: ")


_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*")


_TAG: Final = re.compile(r"[A-Z_][A-Z0-9_]*")


_INDEX: Final = re.compile(r"0|[1-9][0-9]*")


_HIGHEST_INDEX: Final = 10_000


def is_stream_name(text: str) -> bool:
    """Return whether a text is a valid name of a stream or side packet."""
    return _NAME.fullmatch(text) is not None


def parse_stream(text: str) -> tuple[str | None, int, str]:
    """Split a stream into tag (None if absent), index and name."""
    parts = text.split(":")
    if len(parts) > 3:  # noqa: PLR2004 - tag, index, name
        raise InvalidValue("name, TAG:name or TAG:index:name", message=f'"{text}" has {len(parts)} parts')
    *place, name = parts
    tag = _checked_tag(place[0], text) if place else None
    index = _checked_index(place[1], text) if len(place) > 1 else 0
    if not is_stream_name(name):
        raise InvalidValue(
            "lower-case letters, digits and _, no digit first",
            _spelt(name, name.lower()),
            message=f'"{name}" in "{text}" is not a stream name',
        )
    return tag, index, name


def parse_tag_index(text: str) -> Port:
    """Parse a port of ``input_stream_info`` or ``sync_set``: ``TAG``, ``TAG:2``, ``:1`` or empty."""
    tag, colon, index = text.partition(":")
    return Port(_checked_tag(tag, text) if tag else "", _checked_index(index, text) if colon else 0)


def _checked_tag(tag: str, text: str) -> str:
    if not _TAG.fullmatch(tag):
        raise InvalidValue(
            "upper-case letters, digits and _, no digit first",
            _spelt(tag, tag.upper()),
            message=f'"{tag}" in "{text}" is not a tag',
        )
    return tag


def _checked_index(index: str, text: str) -> int:
    # Limit the length first: int() is slow for very long digit strings.
    if not _INDEX.fullmatch(index) or len(index) > len(str(_HIGHEST_INDEX)) or int(index) > _HIGHEST_INDEX:
        raise InvalidValue(f"a number from 0 to {_HIGHEST_INDEX}", message=f'"{index}" in "{text}" is not an index')
    return int(index)


def _spelt(found: str, better: str) -> str:
    fits = _NAME.fullmatch(better) or _TAG.fullmatch(better)
    return f"write {better!r}" if fits and better != found else ""
