"""Grammars of structured output, checked before the engine sees them: an invalid one would stop the engine.

::

    request ─> response_format ─> check_grammar ─> on_one_line ─> Grammar ─> engine (xgrammar)
            └> tools, choice ──> impose_calls ─────────────────────┘
"""

from ovmstrio.text.grammars.checking import check_grammar
from ovmstrio.text.grammars.compact_json import to_compact_json
from ovmstrio.text.grammars.errors import GrammarRefused
from ovmstrio.text.grammars.tool_calls import ForcedCalls, tool_call_grammar

__all__ = ["ForcedCalls", "GrammarRefused", "check_grammar", "to_compact_json", "tool_call_grammar"]
