"""The one check of all kinds of grammars."""

from __future__ import annotations

from ovmstrio.core.generation import Grammar, GrammarKind
from ovmstrio.runtimes.generation.grammars.ebnf import check_ebnf
from ovmstrio.runtimes.generation.grammars.patterns import check_pattern
from ovmstrio.runtimes.generation.grammars.schemas import check_schema, read_schema
from ovmstrio.runtimes.generation.grammars.tags import check_structural_tag

__all__ = ["check_grammar"]


def check_grammar(grammar: Grammar) -> None:
    """See that the engine can impose a grammar; milliseconds for the largest, in proportion to its length.

    Raises:
        GrammarRefused: it cannot, with the place and the way out.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        check_schema(read_schema(grammar.text))
    elif grammar.kind is GrammarKind.REGEX:
        check_pattern(grammar.text)
    elif grammar.kind is GrammarKind.EBNF:
        check_ebnf(grammar.text)
    elif grammar.kind is GrammarKind.STRUCTURAL_TAG:
        check_structural_tag(grammar.text)
