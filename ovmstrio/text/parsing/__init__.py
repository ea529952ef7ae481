"""Text of a model taken apart while it comes: content, reasoning and calls of tools.

::

    engine's text ─> OutputParser.feed ─> Tape (what was read, what may be read again)
                                            └─> Machine ─> a format ─> Output ─> Delta ...
"""

from ovmstrio.text.parsing.parser import Delta, OutputParser
from ovmstrio.text.parsing.registry import REASONING_PARSERS, TOOL_PARSERS, chosen_parsers, make_parser, opens_reasoning

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Delta",
    "OutputParser",
    "chosen_parsers",
    "make_parser",
    "opens_reasoning",
]
