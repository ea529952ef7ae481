"""Items of a body's input as the messages of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.api.openai.fields import shown
from ovmstrio.api.openai.messages import flattened, role_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.api.openai.fields import Fields

__all__ = ["read_input"]

_PASSED_OVER: Final = frozenset({"reasoning"})
"""What a model has thought is not said to it again."""


def read_input(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Read instructions and input as messages; a call of a tool belongs to the assistant's message before it."""
    messages: list[dict[str, Any]] = []
    instructions = fields.prompt_text("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = fields.get("input")
    if given is None:
        fields.refuse("input", "input missing in request", code="missing_required_parameter")
    elif isinstance(given, str):
        fields.prompt.add(len(given))
        messages.append({"role": "user", "content": given})
    else:
        if given == []:
            fields.refuse("input", "Messages array cannot be empty")
        told = "input is not a string or array"
        for item in fields.objects("input", told, "Input item is not a JSON object"):
            _add_item(messages, item)
    return tuple(messages)


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    kind = item.word("type")
    if kind is None or kind == "message":
        messages.append({"role": role_of(item), "content": flattened(item, "content")})
    elif kind == "function_call":
        _add_call(messages, item)
    elif kind == "function_call_output":
        called = item.prompt_text("call_id") or ""
        messages.append({"role": "tool", "tool_call_id": called, "content": flattened(item, "output")})
    elif not isinstance(kind, str) or kind not in _PASSED_OVER:
        item.refuse("type", "Unsupported input item type", got=shown(kind))


def _add_call(messages: list[dict[str, Any]], item: Fields) -> None:
    name, arguments = item.prompt_text("name"), item.prompt_text("arguments")
    if not name:
        item.refuse("name", f"{item.path('name')} is missing")
    call = {
        "id": item.prompt_text("call_id") or "",
        "type": "function",
        "function": {"name": name or "", "arguments": arguments or "{}"},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)
