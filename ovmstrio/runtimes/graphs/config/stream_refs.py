"""The streams and side packets of a node or graph: each string becomes a port and a name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ovmstrio.config.findings import Findings
from ovmstrio.config.located import Located
from ovmstrio.runtimes.graphs.config.graph_config import Port, StreamRef
from ovmstrio.runtimes.graphs.config.graph_messages import INITIALIZATION, INPUT_NAME, OUTPUT_NAME, SIDE_NAME
from ovmstrio.runtimes.graphs.config.stream_names import InvalidName, parse_stream, raw_name

__all__ = ["StreamReader", "refuse_name"]

_GRAPH_TEXTS = {
    "input_stream": INPUT_NAME,
    "output_stream": OUTPUT_NAME,
    "input_side_packet": SIDE_NAME,
    "output_side_packet": SIDE_NAME,
}


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads the streams of one node, or of the graph itself."""

    findings: Findings
    is_graph: bool = False

    def read(self, kind: str, texts: Sequence[str], places: Sequence[Located]) -> tuple[StreamRef, ...]:
        """Give those that are written as they must be; ``kind`` is the field that they are from."""
        found: dict[Port, StreamRef] = {}
        untagged = 0
        for text, at in zip(texts, places, strict=True):
            try:
                tag, index, name = parse_stream(text)
            except InvalidName as error:
                is_empty = self.is_graph and not raw_name(text)
                base = _GRAPH_TEXTS[kind] if is_empty else INITIALIZATION
                refuse_name(self.findings, at, error, text, base)
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
                self._refuse(ref, f'{base} - the name "{ref.name}" is given twice', fix)

    def _refuse(self, ref: StreamRef, message: str, fix: str) -> None:
        self.findings.refuse(ref.at, message, suggestion=fix)


def refuse_name(findings: Findings, at: Located, error: InvalidName, text: str, base: str = INITIALIZATION) -> None:
    """Note a stream or port that is not written as it must be."""
    findings.refuse(
        at,
        f"{base} - INVALID_ARGUMENT: {error.message}",
        expected=error.expected,
        found=text or "nothing",
        suggestion=error.fix,
    )
