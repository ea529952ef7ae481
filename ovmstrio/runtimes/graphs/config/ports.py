"""The streams and side packets of a node or graph: each string becomes a port and a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ovmstrio.runtimes.graphs.config.found import INITIALIZATION, INPUT_NAME, OUTPUT_NAME, SIDE_NAME, GraphFindings
from ovmstrio.runtimes.graphs.config.names import InvalidName, parse_stream, raw_name
from ovmstrio.runtimes.graphs.config.values import Port, StreamRef

__all__ = ["PortReader"]

_GRAPH_TEXTS = {
    "input_stream": INPUT_NAME,
    "output_stream": OUTPUT_NAME,
    "input_side_packet": SIDE_NAME,
    "output_side_packet": SIDE_NAME,
}


@dataclass(frozen=True, slots=True)
class PortReader:
    """Reads the streams of one node, or of the graph itself (where ``path`` is empty)."""

    findings: GraphFindings
    path: str = ""

    def read(self, kind: str, texts: Sequence[str], lines: Sequence[int]) -> tuple[StreamRef, ...]:
        """Give those that are written as they must be; ``kind`` is the field that they are from."""
        found: dict[Port, StreamRef] = {}
        untagged = 0
        for number, (text, line) in enumerate(zip(texts, lines, strict=True)):
            path = f"{self.path}{kind}[{number}]"
            try:
                tag, index, name = parse_stream(text)
            except InvalidName as error:
                self._refuse_name(kind, text, line, path, error)
                continue
            if tag is None:
                index, untagged = untagged, untagged + 1
            self._add(found, StreamRef(Port(tag or "", index), name, line), path)
        self._check_dense(kind, found)
        if not self.path:
            self._check_repeated(kind, list(found.values()))
        return tuple(found.values())

    def _refuse_name(self, kind: str, text: str, line: int, path: str, error: InvalidName) -> None:
        is_empty = not self.path and not raw_name(text)
        self.findings.add(
            _GRAPH_TEXTS[kind] if is_empty else INITIALIZATION, f"INVALID_ARGUMENT: {error.message}", line, path,
            expected=error.expected, found=text or "nothing", fix=error.fix,
        )  # fmt: skip

    def _add(self, found: dict[Port, StreamRef], ref: StreamRef, path: str) -> None:
        other = found.setdefault(ref.port, ref)
        if other is not ref:
            self.findings.add(
                INITIALIZATION,
                f'FAILED_PRECONDITION: tag "{ref.port.tag}" index {ref.port.index} already had a name "{other.name}" '
                f'but is being reassigned a name "{ref.name}"',
                ref.line, path, fix=f"use another tag; line {other.line} has this one",
            )  # fmt: skip

    def _check_dense(self, kind: str, found: dict[Port, StreamRef]) -> None:
        for ref in found.values():
            below = Port(ref.port.tag, ref.port.index - 1)
            if ref.port.index and below not in found:
                self.findings.add(
                    INITIALIZATION,
                    f'FAILED_PRECONDITION: Not all indexes were assigned names: tag "{ref.port.tag}" has index '
                    f"{ref.port.index} and no {below.index}",
                    ref.line, f"{self.path}{kind}", fix="count the indexes of a tag from 0 without gaps",
                )  # fmt: skip

    def _check_repeated(self, kind: str, refs: list[StreamRef]) -> None:
        first: dict[str, StreamRef] = {}
        for ref in refs:
            other = first.setdefault(ref.name, ref)
            if other is not ref:
                details = f'the name "{ref.name}" is given twice'
                fix = f"use another name; line {other.line} has this one"
                self.findings.add(_GRAPH_TEXTS[kind], details, ref.line, kind, fix=fix)
