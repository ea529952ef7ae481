"""How texts of a model are read: which parsers take them apart, and which form the engine has to give them.

::

    request ─> OutputReading.prepare ─> request as the engine gets it, and AnswerReading
    engine's text ─> AnswerReading ─> pieces with content, reasoning and calls
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ovmstrio.core.generation import Conversation, Finish, Piece
from ovmstrio.core.text_bounds import size_of
from ovmstrio.runtimes.generation.grammars import check_grammar, impose_calls, on_one_line
from ovmstrio.runtimes.generation.parsing import Delta, OutputParser, chosen_parsers, make_parser, opens_reasoning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.runtimes.generation.answers import Made

__all__ = ["AnswerReading", "OutputReading"]

_QUICK_SIZE: Final = 8192
"""Characters and members of a form that is checked within a few milliseconds."""
_AUTO: Final = "auto"
_NONE: Final = "none"


class OutputReading:
    """The parsers of a model.

    Args:
        spec: names them.
        template: the model's chat template, which tells them where the settings do not.

    Raises:
        ConfigError: a name is unknown, or two do not go together.
    """

    def __init__(self, spec: TextModelSpec, template: str) -> None:
        self._tools, self._reasoning = chosen_parsers(
            spec.tool_parser or _AUTO, spec.reasoning_parser or _AUTO, template
        )
        self._guided = spec.enable_tool_guided_generation

    def is_slow(self, asked: GenerationRequest) -> bool:
        """Return whether :meth:`prepare` takes more than a few milliseconds, for a large grammar or many tools."""
        if asked.grammar is not None and len(asked.grammar.text) > _QUICK_SIZE:
            return True
        conversation = asked.prompt
        if not isinstance(conversation, Conversation) or not conversation.tools:
            return False
        return size_of(conversation.tools, _QUICK_SIZE) > _QUICK_SIZE

    def prepare(self, asked: GenerationRequest) -> tuple[GenerationRequest, AnswerReading]:
        """Give a request as the engine is to get it, and what reads its texts.

        Raises:
            GrammarRefused: it asks for a form that cannot be imposed.
        """
        if asked.grammar is not None:
            check_grammar(asked.grammar)
            asked = replace(asked, grammar=on_one_line(asked.grammar))
        conversation = asked.prompt
        if not isinstance(conversation, Conversation):
            return asked, AnswerReading(conversation=None, tools=_NONE, reasoning=_NONE)
        has_tools = bool(conversation.tools) and conversation.tool_choice != _NONE
        tools, reasoning = self._tools if has_tools else _NONE, self._reasoning
        imposed = impose_calls(conversation, self._tools, guided=self._guided)
        if imposed is not None and (imposed.forced or asked.grammar is None):
            asked = replace(asked, grammar=imposed.grammar)
            if imposed.forced:
                tools, reasoning = imposed.tool_parser, _NONE
        if not asked.parses or not asked.skips_special_tokens:
            tools = reasoning = _NONE
        reading = AnswerReading(conversation, tools, reasoning)
        if reading.keeps_special_tokens:
            asked = replace(asked, skips_special_tokens=False)
        return asked, reading


class AnswerReading:
    """Reads the texts of one request.

    Args:
        conversation: what is answered.
        tools: the parser of calls.
        reasoning: the parser of reasoning.
    """

    def __init__(self, conversation: Conversation | None, tools: str, reasoning: str) -> None:
        self._conversation = conversation
        self._tools = tools
        self._reasoning = reasoning
        self._reads = conversation is not None and (tools, reasoning) != (_NONE, _NONE)
        self._is_opened = False
        self._parsers: dict[int, OutputParser] = {}
        self._calling: set[int] = set()
        self._ready: deque[Piece] = deque()
        self._counts: dict[int, ReasoningCount] = {}

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the marks that are read are special tokens."""
        return self._reads and self._parser().keeps_special_tokens

    def begin(self, prompt_end: str) -> None:
        """Take the last letters of the prompt, which may have begun reasoning."""
        self._is_opened = self._reads and opens_reasoning(self._reasoning, prompt_end)

    def _parser(self) -> OutputParser:
        tools = () if self._conversation is None else self._conversation.tools
        return make_parser(self._tools, self._reasoning, tools=tools, opened=self._is_opened)

    def next(self) -> Piece | None:
        """Give a piece that has been read; None if there is none."""
        return self._ready.popleft() if self._ready else None

    def feed(self, made: Made) -> None:
        """Read what has been made: one piece, or several where it holds calls, the last of which says how it ended."""
        deltas, reasoning_tokens = self._deltas(made)
        if self._conversation is not None and self._conversation.calls_once:
            deltas = [replace(delta, calls=tuple(call for call in delta.calls if not call.index)) for delta in deltas]
        last = len(deltas) - 1
        for position, delta in enumerate(deltas):
            self._ready.append(
                Piece(
                    index=made.index,
                    text=delta.text,
                    reasoning=delta.reasoning,
                    calls=delta.calls,
                    tokens=0 if position else made.tokens,
                    reasoning_tokens=0 if position else reasoning_tokens,
                    logprobs=() if position else tuple(made.logprobs),
                    finish=self._finish(made) if position == last else None,
                )
            )

    def _deltas(self, made: Made) -> tuple[list[Delta], int]:
        """Give what a text says, at least one thing, and how many of its tokens are reasoning."""
        if not self._reads:
            return [Delta(text=made.text)], 0
        parser = self._parsers.get(made.index)
        if parser is None:
            parser = self._parsers[made.index] = self._parser()
            self._counts[made.index] = ReasoningCount()
        # Where some of it may be reasoning, what has been joined is read step by step again: tokens are counted so.
        parts = [(made.text, made.tokens)] if self._reasoning == _NONE else made.parts
        deltas: list[Delta] = []
        reasoning_tokens = 0
        for text, tokens in parts:
            said = parser.feed(text)
            reasoning_tokens += self._counts[made.index].take(said, tokens)
            deltas += said
        if made.finish is not None:
            deltas += parser.finish()
        if any(delta.calls for delta in deltas):
            self._calling.add(made.index)
        return deltas or [Delta()], reasoning_tokens

    def _finish(self, made: Made) -> Finish | None:
        if made.finish is Finish.STOP and made.index in self._calling:
            return Finish.TOOL_CALLS
        return made.finish


class ReasoningCount:
    """Tells which of a text's tokens are reasoning: what says nothing, such as marks, belongs to what is before it."""

    __slots__ = ("_is_reasoning", "_undecided")

    def __init__(self) -> None:
        self._is_reasoning: bool | None = None
        self._undecided = 0

    def take(self, said: Sequence[Delta], tokens: int) -> int:
        """Take tokens and what they say; give how many turn out to be reasoning."""
        if any(delta.text or delta.calls for delta in said):
            self._is_reasoning = False
        elif any(delta.reasoning for delta in said):
            self._is_reasoning = True
        if self._is_reasoning is None:
            self._undecided += tokens
            return 0
        tokens, self._undecided = tokens + self._undecided, 0
        return tokens if self._is_reasoning else 0
