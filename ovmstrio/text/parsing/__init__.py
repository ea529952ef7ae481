"""Streaming output parsers: split generated text into content, reasoning and tool calls.

::

    engine output ─> Machine.feed ─> Tape (cursor with backtracking)
                                       └─> format parser ─> ParsedOutput ─> Delta ...
"""

from ovmstrio.text.parsing.parser import Delta, Machine
from ovmstrio.text.parsing.registry import REASONING_PARSERS, TOOL_PARSERS, chosen_parsers, make_parser, opens_reasoning

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Delta",
    "Machine",
    "chosen_parsers",
    "make_parser",
    "opens_reasoning",
]
