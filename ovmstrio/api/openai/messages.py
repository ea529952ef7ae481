"""Messages of a conversation, read so that any chat template can be given them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from ovmstrio.api.openai.fields import MAX_NAME_CHARACTERS, Fields, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["flattened", "read_messages", "role_of"]

_TEXTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Where parts of a content have their text, by their types."""
_MEDIA: Final = frozenset({"image_url", "input_image", "input_audio", "video_url", "file", "input_file"})
_PASSED: Final = ("name", "tool_call_id", "reasoning_content")
_INSTEAD: Final[Mapping[str, str]] = {"developer": "system"}
"""Roles that templates do not know, with those that stand for them."""


def read_messages(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Read the messages of a chat: role and one text each, and what else templates know."""
    if fields.get("messages") is None:
        fields.refuse("messages", "Messages missing in request", code="missing_required_parameter")
        return ()
    if fields.get("messages") == []:
        fields.refuse("messages", "Messages array cannot be empty")
    objects = fields.objects("messages", "Messages are not an array", "Message is not a JSON object")
    return tuple(_read_message(each) for each in objects)


def role_of(fields: Fields) -> str:
    """Read whose a message is, as templates know it."""
    role = fields.word("role")
    if role is None or role == "":
        fields.refuse("role", "Every message must have 'role' field")
        return ""
    if not isinstance(role, str) or len(role) > MAX_NAME_CHARACTERS:
        fields.refuse("role", "Invalid message structure", got=shown(role))
        return ""
    return _INSTEAD.get(role, role)


def _read_message(fields: Fields) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role_of(fields), "content": flattened(fields, "content")}
    for name in _PASSED:
        text = fields.prompt_text(name, "Invalid message structure")
        if text is not None:
            message[name] = text
    calls = [_read_call(call) for call in fields.objects("tool_calls", "", "Each tool_call must be an object")]
    if calls:
        message["tool_calls"] = calls
    return message


def _read_call(fields: Fields) -> dict[str, Any]:
    function = fields.within("function", "Each tool_call must have a 'function' object")
    if function is None:
        if fields.get("function") is None:
            fields.refuse("function", "Each tool_call must have a 'function' object")
        return {}
    name = function.prompt_text("name")
    if not name:
        function.refuse("name", f"{function.path('name')} is missing")
    return {
        "id": fields.prompt_text("id") or "",
        "type": "function",
        "function": {"name": name or "", "arguments": _read_arguments(function)},
    }


def _read_arguments(function: Fields) -> str:
    """Give arguments as the text that OpenAI has for them; some clients send the object."""
    value = function.get("arguments")
    if not isinstance(value, dict):
        return function.prompt_text("arguments") or "{}"
    arguments = function.mapping("arguments", is_prompt=True)
    return "{}" if arguments is None else orjson.dumps(arguments).decode()


def flattened(fields: Fields, name: str) -> str:
    """Read a content, a text or a list of parts, as one text; nothing is an empty one."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        fields.prompt.add(len(value or ""))
        return value or ""
    if not isinstance(value, list):
        fields.refuse(name, "Invalid message structure", got=shown(value))
        return ""
    texts = []
    for part in fields.objects(name, "", "Invalid message structure - content array should contain objects"):
        kind = part.word("type")
        if not isinstance(kind, str):
            part.refuse("type", "Invalid message structure - content object type missing")
        elif kind in _TEXTS:
            text = part.prompt_text(_TEXTS[kind], "Invalid message structure - content text missing")
            if part.get(_TEXTS[kind]) is None:
                part.refuse(_TEXTS[kind], "Invalid message structure - content text missing")
            texts.append(text or "")
        else:
            known = "this model reads text only" if kind in _MEDIA else "expected text"
            part.refuse("type", "Unsupported content type", got=f"{shown(kind)}, and {known}")
    return "\n".join(texts)
