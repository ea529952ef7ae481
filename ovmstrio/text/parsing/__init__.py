"""Streaming output parsers: split generated text into content, reasoning and tool calls.

::

    engine output ─> Machine.feed ─> Tape (cursor with backtracking)
                                       └─> format parser ─> ParsedOutput ─> Delta ...
"""

from ovmstrio.text.parsing.parser import Delta, StreamingParser
from ovmstrio.text.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    DetectedParsers,
    detect_parsers,
    ends_reasoning,
    make_parser,
    opens_reasoning,
    select_parsers,
)

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Delta",
    "DetectedParsers",
    "StreamingParser",
    "detect_parsers",
    "ends_reasoning",
    "make_parser",
    "opens_reasoning",
    "select_parsers",
]
