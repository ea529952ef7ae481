"""Registry of the output parsers, and their detection from a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ovmstrio.config.documents import did_you_mean, invalid_value_error
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.text.parsing.bracket_formats import GemmaParser, LiquidParser, Llama4Parser, NemotronParser
from ovmstrio.text.parsing.json_formats import (
    DeepSeekParser,
    GenericParser,
    GraniteParser,
    HermesParser,
    KimiParser,
    LlamaParser,
    MistralParser,
    PhiParser,
)
from ovmstrio.text.parsing.message_formats import HarmonyParser, OnyxParser
from ovmstrio.text.parsing.parser import ParserInputs, ReasoningMarkers, StreamingParser
from ovmstrio.text.parsing.tagged_formats import GlmParser, MiniCpmParser, QwenCoderParser

_TOOLS: Final[Mapping[str, type[StreamingParser]]] = {
    "none": StreamingParser,
    "generic": GenericParser,
    "hermes3": HermesParser,
    "llama3": LlamaParser,
    "phi4": PhiParser,
    "mistral": MistralParser,
    "devstral": MistralParser,
    "gptoss": HarmonyParser,
    "qwen3coder": QwenCoderParser,
    "lfm2": LiquidParser,
    "gemma4": GemmaParser,
    "onyx": OnyxParser,
    "minicpm5": MiniCpmParser,
    "deepseek": DeepSeekParser,
    "granite": GraniteParser,
    "kimi_k2": KimiParser,
    "nemotron": NemotronParser,
    "llama4_pythonic": Llama4Parser,
    "glm45": GlmParser,
}
_TOOL_ALIASES: Final[Mapping[str, str]] = {
    "hermes": "hermes3",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "pythonic": "llama4_pythonic",
    "phi4_mini_json": "phi4",
    "qwen3_coder": "qwen3coder",
    "qwen3_xml": "qwen3coder",
    "openai": "gptoss",
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "granite-20b-fc": "granite",
    "glm47": "glm45",
}
"""Parsers by their names in vLLM, where these differ."""
_THINK: Final = ReasoningMarkers("<think>", "</think>")
_REASONING: Final[Mapping[str, ReasoningMarkers | None]] = {
    "none": None,
    "qwen3": _THINK,
    "deepseek": _THINK,
    "minicpm5": _THINK,
    "lfm2": ReasoningMarkers("<think>", "</think>", special=True),
    "gemma4": ReasoningMarkers("<|channel>thought\n", "<channel|>", special=True),
    "granite": ReasoningMarkers(
        "<think>",
        "</think>",
        others=(
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
        ),
        answer=("<response>", "</response>"),
    ),
    "gptoss": None,
    "onyx": None,
}
_REASONING_ALIASES: Final[Mapping[str, str]] = {
    "deepseek_r1": "deepseek",
    "deepseek_v3": "deepseek",
    "glm45": "qwen3",
    "kimi_k2": "qwen3",
    "openai_gptoss": "gptoss",
}
_COMBINED: Final = ("gptoss", "onyx")
"""Formats that parse tool calls and reasoning together."""

TOOL_PARSERS: Final = ("auto", *_TOOLS)
"""Values of ``--tool-parser``."""

REASONING_PARSERS: Final = ("auto", *_REASONING)
"""Values of ``--reasoning-parser``."""

_THINK_MARKERS: Final = ("<think>", "</think>", "my thought process:")
_SIGNS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("gptoss", ("<|channel|>", "<|message|>")),
    ("onyx", ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")),
    ("gemma4", ("<|tool_call>call:",)),
    ("qwen3coder", ("<parameter=", "</parameter>", "<function=")),
    ("minicpm5", ('<param name="',)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|assistant_tool_call|>",)),
    ("lfm2", ("keep_past_thinking",)),
    ("phi4", ("functools",)),
    ("devstral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("mistral", ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")),
    ("deepseek", ("tool▁calls▁begin",)),
    ("kimi_k2", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("glm45", ("<arg_key>", "<arg_value>")),
    ("nemotron", ("<TOOLCALL>",)),
    ("nemotron", ("<toolcall>",)),
    ("granite", ("<|start_of_role|>", "tool_call")),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>", "tools")),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", "tools")),
    ("hermes3", ("<tool_call>", "</tool_call>")),
)
_OWN_REASONING: Final = frozenset({"gptoss", "onyx", "gemma4", "minicpm5", "lfm2", "granite"})
_OPTIONAL_REASONING: Final = frozenset({"lfm2", "granite"})
"""Formats of which some models reason."""
_ARCHITECTURES: Final = (
    ("Gemma4", "gemma4"),
    ("Qwen", "hermes3"),
    ("Mistral", "mistral"),
    ("Ministral", "mistral"),
    ("Lfm2", "lfm2"),
    ("Phi3", "phi4"),
    ("Phi4", "phi4"),
    ("Deepseek", "deepseek"),
    ("MiniCPM", "minicpm5"),
    ("Granite", "granite"),
    ("Kimi", "kimi_k2"),
    ("Nemotron", "nemotron"),
    ("Llama4", "llama4_pythonic"),
    ("Glm4Moe", "glm45"),
    ("GptOss", "gptoss"),
)
"""Tool parsers by the beginnings of architectures."""


class DetectedParsers(NamedTuple):
    """Parsers of a model.

    Attributes:
        tools: tool parser.
        reasoning: reasoning parser.
        is_by_architecture: whether the architecture decided the tool parser, not the chat template.
        is_unknown: whether the chat template has tools in a format without a parser.
    """

    tools: str
    reasoning: str
    is_by_architecture: bool = False
    is_unknown: bool = False


def detect_parsers(
    tool_parser: str, reasoning_parser: str, template: str, architectures: Sequence[str] = ()
) -> DetectedParsers:
    """Return the parsers of a model, as :func:`select_parsers`, for a template of unknown format by the architecture.

    Raises:
        ConfigError: as :func:`select_parsers`.
    """
    tools, reasoning = select_parsers(tool_parser, reasoning_parser, template)
    # A template without tools gets a message that asks for the generic format.
    if tool_parser != "auto" or tools != "generic" or "tools" not in template:
        return DetectedParsers(tools, reasoning)
    for prefix, parser in _ARCHITECTURES:
        if any(each.startswith(prefix) for each in architectures):
            return DetectedParsers(*select_parsers(parser, reasoning_parser, template), is_by_architecture=True)
    return DetectedParsers(tools, reasoning, is_unknown=True)


def select_parsers(tool_parser: str, reasoning_parser: str, template: str = "") -> tuple[str, str]:
    """Return the tool and reasoning parsers, resolving ``auto`` by the chat template.

    Raises:
        ConfigError: a name is unknown, or the two are incompatible.
    """
    tool_parser = _TOOL_ALIASES.get(tool_parser, tool_parser)
    reasoning_parser = _REASONING_ALIASES.get(reasoning_parser, reasoning_parser)
    _check(tool_parser, TOOL_PARSERS, "tool_parser")
    _check(reasoning_parser, REASONING_PARSERS, "reasoning_parser")
    tools, thinks = _detected(template)
    given = {tool_parser, reasoning_parser} - {"auto"}
    for both in _COMBINED:
        if both in given:
            if given - {both, "none"}:
                other = next(iter(given - {both, "none"}))
                raise ConfigError([_incompatible(both, other)])
            return both, both
    if tool_parser == reasoning_parser == "auto" and tools in _COMBINED:
        return tools, tools
    return (
        _unless_combined(tools, "none") if tool_parser == "auto" else tool_parser,
        _unless_combined(thinks, "none") if reasoning_parser == "auto" else reasoning_parser,
    )


def make_parser(
    tool_parser: str,
    reasoning_parser: str,
    *,
    template: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    opened: bool = False,
) -> StreamingParser:
    """Create the parser of one text.

    Args:
        tool_parser: one of ``TOOL_PARSERS``; ``none`` for requests without tools.
        reasoning_parser: one of ``REASONING_PARSERS``.
        template: chat template, for ``auto``.
        tools: the request's tools in OpenAI's form; formats without quotes use their schemas, and calls without a
            marker must name one of them.
        opened: whether the prompt ended within reasoning; see :func:`opens_reasoning`.

    Raises:
        ConfigError: as :func:`select_parsers`.
    """
    calls, thinks = select_parsers(tool_parser, reasoning_parser, template)
    thinking = _REASONING[thinks]
    if thinking is not None and opened:
        thinking = replace(thinking, opened=True)
    return _TOOLS[calls](ParserInputs(thinking, dict(map(_schema, tools))))


def opens_reasoning(reasoning_parser: str, prompt: str) -> bool:
    """Return True if the prompt's end opens a reasoning block."""
    thinking = _REASONING.get(reasoning_parser)
    return thinking is not None and prompt.rstrip().endswith(thinking.begin.rstrip())


def ends_reasoning(reasoning_parser: str, text: str) -> bool:
    """Return True if a text has the marker at the end of a reasoning block."""
    thinking = _REASONING.get(reasoning_parser)
    return thinking is not None and thinking.end in text


def _check(name: str, known: Sequence[str], option: str) -> None:
    if name not in known:
        expected = f"one of {', '.join(known)}"
        raise invalid_value_error(
            option, name, expected, message="unknown parser", suggestion=did_you_mean(name, known)
        )


def _incompatible(both: str, other: str) -> Problem:
    return Problem(
        f"tool_parser and reasoning_parser are incompatible: {both!r} parses calls and reasoning together",
        expected=f"{both!r} for both",
        found=repr(other),
        suggestion="leave one of them out",
    )


def _detected(template: str) -> tuple[str, str]:
    thinks = "qwen3" if any(sign in template for sign in _THINK_MARKERS) else "none"
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            own = name in _OWN_REASONING and (name not in _OPTIONAL_REASONING or thinks != "none")
            return name, name if own else thinks
    return "generic", thinks


def _unless_combined(name: str, otherwise: str) -> str:
    return otherwise if name in _COMBINED else name


def _schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return "", {}
    parameters = function.get("parameters")
    return str(function.get("name", "")), parameters if isinstance(parameters, Mapping) else {}
