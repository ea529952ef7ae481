"""Grammars of structured output: limits, JSON schemas on one line, and forced tool calls.

::

    request ─> response_format ─> check_grammar ─> to_compact_json ─> Grammar ─> engine
            └> tools, tool_choice ─> check_tools ─> tool_call_grammar ───┘

The engine compiles a grammar before its request joins the batch, and refuses what it cannot compile.
"""

from ovmstrio.text.grammars.checking import check_grammar
from ovmstrio.text.grammars.compact_json import to_compact_json
from ovmstrio.text.grammars.limits import GrammarRefused
from ovmstrio.text.grammars.tool_calls import ForcedCalls, check_tools, tool_call_grammar

__all__ = ["ForcedCalls", "GrammarRefused", "check_grammar", "check_tools", "to_compact_json", "tool_call_grammar"]
