"""Statistics of a stream, and its outputs as text or as values."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.cli.console import print_message
from ovmstrio.cli.problems import count
from ovmstrio.cli.tensor_output import plain
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.raw_contents import from_raw
from ovmstrio.util.truncation import escape_controls

if TYPE_CHECKING:
    from codecs import IncrementalDecoder

    from ovmstrio.client.api import StreamOutput, StreamReply

_TEXT_TYPES: Final = frozenset({"UINT8", "BYTES"})
_NOT_TEXT: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Characters that do not occur in text; bytes with one of them are numbers."""
_LINE_BREAKS: Final = {0x0D: None, 0x0B: "\n", 0x0C: "\n"}
_SHOWN: Final = 8

_Utf8: Final = getincrementaldecoder("utf-8")


@dataclass(slots=True)
class Seen:
    """Statistics of a stream so far."""

    started: float = field(default_factory=perf_counter)
    first: float = 0.0
    last: float = 0.0
    outputs: int = 0
    problem: str = ""

    def add(self, reply: StreamReply) -> None:
        """Count a response, and print its error."""
        if reply.outputs:
            self.last = perf_counter()
            self.first = self.first or self.last
            self.outputs += len(reply.outputs)
        if reply.error:
            self.problem = reply.error
            print_message(f"error: {safe_for_terminals(reply.error)}", style="red")

    def summary(self) -> str:
        """Return the time to the first output and the rate of the others as a text."""
        if not self.outputs:
            return "no output"
        seconds = self.last - self.first
        rate = f", {(self.outputs - 1) / seconds:.1f} outputs/s" if seconds > 0 else ""
        first = (self.first - self.started) * 1e3
        return f"first output after {first:.1f} ms, {count(self.outputs, 'output')}{rate}"


class TextReader:
    """Decoder of the outputs of one stream; a UTF-8 character may span two outputs."""

    def __init__(self) -> None:
        self._decoders: dict[str, IncrementalDecoder] = {}

    def read(self, output: StreamOutput) -> str | None:
        """Return an output as text, None if it is not text."""
        if not _is_encoded(output):
            return output.data if isinstance(output.data, str) else None
        decoder = self._decoders.get(output.name) or _Utf8()
        try:
            text = decoder.decode(output.data)
        except UnicodeDecodeError:
            self._decoders.pop(output.name, None)
            return None
        if _NOT_TEXT.search(text):
            return None
        if text:
            self._decoders[output.name] = decoder
        # Accept a part of a character only after earlier text.
        return text if output.name in self._decoders or not output.data else None


def text_of(output: StreamOutput) -> str | None:
    """Return an output as text, None if it is not complete UTF-8 text."""
    if not _is_encoded(output):
        return output.data if isinstance(output.data, str) else None
    try:
        text = bytes(output.data).decode()
    except UnicodeDecodeError:
        return None
    return None if _NOT_TEXT.search(text) else text


def _is_encoded(output: StreamOutput) -> bool:
    """Return whether the output is bytes with a datatype that Python nodes use for texts."""
    return isinstance(output.data, bytes) and (output.datatype in _TEXT_TYPES or output.datatype not in BY_NAME)


def safe_for_terminals(text: str) -> str:
    """Escape terminal control characters, and normalize line breaks."""
    return escape_controls(text.translate(_LINE_BREAKS), keep="\n\t")


def values_of(output: StreamOutput) -> Any:
    """Convert an output for JSON; bytes that do not fit their datatype become a list of numbers."""
    if not isinstance(output.data, bytes):
        return output.data
    try:
        return plain(from_raw(output.data, output.datatype, output.shape))
    except (ValueError, KeyError):
        return list(output.data)


def line_of(output: StreamOutput) -> str:
    """Summarize an output: datatype, shape and first values."""
    values = _flat(values_of(output))
    shown = ", ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in values[:_SHOWN])
    more = ", ..." if len(values) > _SHOWN else ""
    return f"{output.datatype} {list(output.shape)} {shown}{more}".rstrip()


def _flat(value: Any) -> list[Any]:
    while isinstance(value, list) and any(isinstance(each, list) for each in value):
        value = [inner for each in value for inner in (each if isinstance(each, list) else [each])]
    return value if isinstance(value, list) else [value]
