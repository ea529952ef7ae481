"""Grammars of structured output, checked before the engine sees them: an invalid one would stop the engine.

::

    request ─> response_format ─> check_grammar ─> on_one_line ─> Grammar ─> engine (xgrammar)
            └> tools, choice ──> impose_calls ─────────────────────┘
"""

from ovmstrio.text.grammars.checking import check_grammar
from ovmstrio.text.grammars.compact_json import on_one_line
from ovmstrio.text.grammars.refusals import GrammarRefused
from ovmstrio.text.grammars.tool_calls import ImposedCalls, impose_calls

__all__ = ["GrammarRefused", "ImposedCalls", "check_grammar", "impose_calls", "on_one_line"]
