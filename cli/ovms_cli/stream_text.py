"""What comes of a stream: its figures, and its outputs as text, where they are one, and as values."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ovms_cli.console import note
from ovms_cli.problems import count
from ovms_cli.tensor_output import plain
from ovmstrio.core.tensor import BY_NAME
from ovmstrio.encoding.wire_tensors import from_raw
from ovmstrio.util.truncation import escape_controls

if TYPE_CHECKING:
    from codecs import IncrementalDecoder

    from ovmstrio.client.api import StreamOutput, StreamReply

_TEXT_TYPES: Final = frozenset({"UINT8", "BYTES"})
_NOT_TEXT: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Characters that no text has; bytes that hold one are numbers."""
_LINE_BREAKS: Final = {0x0D: None, 0x0B: "\n", 0x0C: "\n"}
_SHOWN: Final = 8

_Utf8: Final = getincrementaldecoder("utf-8")


@dataclass(slots=True)
class Seen:
    """What has come of a stream so far."""

    started: float = field(default_factory=perf_counter)
    first: float = 0.0
    last: float = 0.0
    outputs: int = 0
    problem: str = ""

    def note(self, reply: StreamReply) -> None:
        """Count a reply, and tell of a problem."""
        if reply.outputs:
            self.last = perf_counter()
            self.first = self.first or self.last
            self.outputs += len(reply.outputs)
        if reply.error:
            self.problem = reply.error
            note(f"error: {safe_for_terminals(reply.error)}", style="red")

    def summary(self) -> str:
        """Say how long the first output took, and how fast the others came."""
        if not self.outputs:
            return "no output"
        seconds = self.last - self.first
        rate = f", {(self.outputs - 1) / seconds:.1f} outputs/s" if seconds > 0 else ""
        first = (self.first - self.started) * 1e3
        return f"first output after {first:.1f} ms, {count(self.outputs, 'output')}{rate}"


class TextReader:
    """Reads the outputs of one stream; a letter of a text may end in the output that follows."""

    def __init__(self) -> None:
        self._decoders: dict[str, IncrementalDecoder] = {}

    def read(self, output: StreamOutput) -> str | None:
        """Give an output as text, None if it is none."""
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
        # A part of a letter is taken for one only where text came before.
        return text if output.name in self._decoders or not output.data else None


def text_of(output: StreamOutput) -> str | None:
    """Give an output as text, None if it is none, or not a whole one."""
    if not _is_encoded(output):
        return output.data if isinstance(output.data, str) else None
    try:
        text = bytes(output.data).decode()
    except UnicodeDecodeError:
        return None
    return None if _NOT_TEXT.search(text) else text


def _is_encoded(output: StreamOutput) -> bool:
    """Tell whether it is bytes of a type that Python nodes give to texts."""
    return isinstance(output.data, bytes) and (output.datatype in _TEXT_TYPES or output.datatype not in BY_NAME)


def safe_for_terminals(text: str) -> str:
    """Escape what a terminal would obey instead of showing it, and make one line break of all kinds."""
    return escape_controls(text.translate(_LINE_BREAKS), keep="\n\t")


def values_of(output: StreamOutput) -> Any:
    """Give an output as JSON can hold it; bytes that are not what their datatype says are a list of numbers."""
    if not isinstance(output.data, bytes):
        return output.data
    try:
        return plain(from_raw(output.data, output.datatype, output.shape))
    except (ValueError, KeyError):
        return list(output.data)


def line_of(output: StreamOutput) -> str:
    """Sum an output up: its type, its shape, and its first values."""
    values = _flat(values_of(output))
    shown = ", ".join(f"{each:.6g}" if isinstance(each, float) else str(each) for each in values[:_SHOWN])
    more = ", ..." if len(values) > _SHOWN else ""
    return f"{output.datatype} {list(output.shape)} {shown}{more}".rstrip()


def _flat(value: Any) -> list[Any]:
    while isinstance(value, list) and any(isinstance(each, list) for each in value):
        value = [inner for each in value for inner in (each if isinstance(each, list) else [each])]
    return value if isinstance(value, list) else [value]
