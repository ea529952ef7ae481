"""Forms that answers are to have, checked before an engine sees them, for one that cannot be compiled stops its engine.

::

    request ─> response_format ─> check_grammar ─> on_one_line ─> Grammar ─> engine (xgrammar)
            └> tools, choice ──> impose_calls ─────────────────────┘
"""

from ovmstrio.runtimes.generation.grammars.calls import ImposedCalls, impose_calls
from ovmstrio.runtimes.generation.grammars.checking import check_grammar
from ovmstrio.runtimes.generation.grammars.one_line import on_one_line
from ovmstrio.runtimes.generation.grammars.refusals import GrammarRefused

__all__ = ["GrammarRefused", "ImposedCalls", "check_grammar", "impose_calls", "on_one_line"]
