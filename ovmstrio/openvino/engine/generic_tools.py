"""Tools for templates that know none: explained in a message, with calls and their results as texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["with_generic_tools"]

_EXPLAINED: Final = (
    "These functions can be called:\n{tools}\n\nTo call some of them, answer with nothing but JSON of this form:\n"
    '{{"tool_calls": [{{"name": "<name>", "arguments": {{"<parameter>": "<value>"}}}}]}}\n'
    "The results come in the next message. Where no function is needed, answer in words."
)


def with_generic_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Give messages whose texts tell of calls and functions, without the fields that this template does not know."""
    told = [_told(message) for message in messages]
    if not tools:
        return told
    explained = _EXPLAINED.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if told and told[0].get("role") == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{explained}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": explained}, *told]


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(message)
    calls = told.pop("tool_calls", None)
    if calls:
        functions = [call.get("function", {}) for call in calls]
        wanted = [{"name": one.get("name"), "arguments": one.get("arguments")} for one in functions]
        text = _json({"tool_calls": wanted})
        told["content"] = f"{told['content']}\n{text}" if told.get("content") else text
    if told.get("role") == "tool":
        name = told.get("name") or told.get("tool_call_id") or "function"
        return {"role": "user", "content": f"Result of {name}:\n{told.get('content', '')}"}
    return told


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
