"""Grammars that force tool calls, in the format of the model's tool parser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Conversation, Grammar, GrammarKind
from ovmstrio.text.grammars.compact_json import compact_json_rules
from ovmstrio.text.grammars.limits import MAX_GRAMMAR_CHARACTERS, GrammarRefused
from ovmstrio.text.grammars.schemas import check_imposed, check_schema, check_shape, with_integer_bounds
from ovmstrio.util.truncation import size_of

_SCHEMA_PATH: Final = re.compile(
    r"(?s)at \$\.format(\.\w+\[(?P<number>\d+)\])?\.content\.json_schema(?P<path>.*?): (?P<reason>.*)"
)
_ANY_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """A grammar of tool calls.

    Attributes:
        tool_parser: parser of the result; another one than the model's if its format has no grammar.
        forced: whether the output is a call only, without content and reasoning.
        fields: request field of each function's schema, in the grammar's order.
    """

    grammar: Grammar
    tool_parser: str
    forced: bool
    fields: tuple[str, ...]

    def refusal(self, error: InvalidField) -> GrammarRefused:
        """Return the engine's error about the grammar as an error of the function whose schema it names."""
        reason = error.message.removeprefix(f"{error.field}: ")
        found = _SCHEMA_PATH.match(reason)
        if found is None:
            return GrammarRefused("", reason, field="tools")
        return GrammarRefused(f"${found['path']}", found["reason"], field=self.fields[int(found["number"] or 0)])


@dataclass(frozen=True, slots=True)
class _CallFormat:
    """Text around a call's arguments, ``{}`` being the name; ``trigger`` begins no content."""

    begin: str
    end: str
    trigger: str = ""
    content: str = "json_schema"


_CALL_FORMATS: Final[Mapping[str, _CallFormat]] = {
    "hermes3": _CallFormat('<tool_call>\n{{"name": "{}", "arguments": ', "}\n</tool_call>", "<tool_call>"),
    "llama3": _CallFormat('{{"name": "{}", "parameters": ', "}"),
    "phi4": _CallFormat('functools[{{"name": "{}", "arguments": ', "}]", "functools["),
    "mistral": _CallFormat('[TOOL_CALLS][{{"name": "{}", "arguments": ', "}]", "[TOOL_CALLS]"),
    "devstral": _CallFormat("[TOOL_CALLS]{}[ARGS]", "", "[TOOL_CALLS]"),
    "gptoss": _CallFormat("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "<|call|>"),
    "qwen3coder": _CallFormat(
        "<tool_call>\n<function={}>\n", "\n</function>\n</tool_call>", "<tool_call>", content="qwen_xml_parameter"
    ),
    "granite": _CallFormat('<tool_call>\n{{"name": "{}", "arguments": ', "}\n</tool_call>", "<tool_call>"),
    "nemotron": _CallFormat('<TOOLCALL>[{{"name": "{}", "arguments": ', "}]</TOOLCALL>", "<TOOLCALL>"),
    "kimi_k2": _CallFormat(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>",
    ),
    "generic": _CallFormat('{{"tool_calls": [{{"name": "{}", "arguments": ', "}]}", '{"tool_calls"'),
}


def check_tools(conversation: Conversation) -> None:
    """Check the parameters of all functions; those of strict functions must be imposed completely.

    Raises:
        GrammarRefused: parameters are not the schema of an object, or not supported.
    """
    for number, tool in enumerate(conversation.tools):
        function = tool["function"]
        try:
            check_shape(function.get("parameters") or {}, expected_type="object")
            if function.get("strict"):
                check_imposed(function.get("parameters"))
        except GrammarRefused as refused:
            raise refused.of(_parameters_field(conversation, number)) from None


def _parameters_field(conversation: Conversation, number: int) -> str:
    fields = conversation.parameters_fields
    return fields[number] if fields else f"tools[{number}].function.parameters"


def tool_call_grammar(conversation: Conversation, tool_parser: str, *, guided: bool = False) -> ForcedCalls | None:
    """Return the grammar for a request's tools; None for free generation.

    ``tool_choice`` ``required`` or a named function force one call.  Otherwise, calls of ``strict`` tools (of all with
    ``guided``) get arguments that match their schemas, if the format marks the start of a call.

    Args:
        conversation: the request.
        tool_parser: the model's, never ``auto``.
        guided: the model's ``enable_tool_guided_generation``.

    Raises:
        GrammarRefused: a parameter schema is not supported.
    """
    forced = conversation.tool_choice in {"required", "function"}
    functions = [tool["function"] for tool in conversation.tools]
    if not functions or conversation.tool_choice == "none":
        return None
    if conversation.tool_choice == "function":
        functions = [function for function in functions if function["name"] == conversation.tool_name]
    # Formats without JSON have no grammar; the generic format works with every model.
    name = tool_parser if tool_parser in _CALL_FORMATS or not forced else "generic"
    form = _CALL_FORMATS.get(name)
    strict = any(function.get("strict") for function in functions)
    if form is None or not (forced or (form.trigger and (guided or strict))):
        return None
    places = {tool["function"]["name"]: number for number, tool in enumerate(conversation.tools)}
    fields = tuple(_parameters_field(conversation, places[function["name"]]) for function in functions)
    if size_of(functions, MAX_GRAMMAR_CHARACTERS) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(
            "", f"expected at most {MAX_GRAMMAR_CHARACTERS} characters with forced or strict calls", field="tools"
        )
    tags = [
        _tag(form, function, field, imposed=forced or guided) for function, field in zip(functions, fields, strict=True)
    ]
    if not forced:
        shape = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    else:
        shape = tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}
    text = json.dumps({"type": "structural_tag", "format": shape}, ensure_ascii=False)
    return ForcedCalls(Grammar(GrammarKind.STRUCTURAL_TAG, text), name, forced, fields)


def _tag(form: _CallFormat, function: Mapping[str, Any], field: str, *, imposed: bool) -> dict[str, Any]:
    schema = function.get("parameters") if imposed or function.get("strict") else None
    parameters = _parameters(schema)
    try:
        check_schema(parameters)
    except GrammarRefused as refused:
        raise refused.of(field) from None
    return {
        "type": "tag",
        "begin": form.begin.format(json.dumps(function["name"], ensure_ascii=False)[1:-1]),
        "content": _content(form, with_integer_bounds(parameters)),
        "end": form.end,
    }


def _content(form: _CallFormat, parameters: Any) -> Mapping[str, Any]:
    rules = compact_json_rules(parameters) if form.content == "json_schema" else None
    if rules is not None:
        return {"type": "grammar", "grammar": rules}
    return {"type": form.content, "json_schema": parameters}


def _parameters(schema: Any) -> Any:
    """Return the schema of arguments, an object; any object without a schema."""
    if not isinstance(schema, Mapping) or not schema:
        return _ANY_ARGUMENTS
    given = dict(schema)
    if not any(key in given for key in ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")):
        given["type"] = "object"
        if "properties" not in given:
            given.setdefault("additionalProperties", True)
    return given
