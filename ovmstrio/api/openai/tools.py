"""Tools that a model may call, and which of them it has to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.api.openai.fields import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.api.openai.fields import Fields

__all__ = ["Tools", "read_tools"]

_CHOICES: Final = frozenset({"none", "auto", "required"})
_FUNCTION: Final = "function"
_ALLOWED: Final = "allowed_tools"


class Tools(NamedTuple):
    """Tools and the choice among them, as ``Conversation`` has them."""

    tools: tuple[Mapping[str, Any], ...]
    choice: str
    name: str


def read_tools(fields: Fields) -> Tools:
    """Read tools, of which none are left where none may be called."""
    choice, name, allowed = _read_choice(fields)
    tools = tuple(
        _read_tool(tool) for tool in fields.objects("tools", "Tools are not an array", "Tool is not a JSON object")
    )
    if allowed is not None:
        tools = _only(tools, allowed, fields)
    if choice == "none":
        return Tools((), choice, "")
    if not tools and choice in {"required", _FUNCTION}:
        fields.refuse("tool_choice", "tool_choice is only allowed when tools are specified")
    elif name and name not in {tool[_FUNCTION]["name"] for tool in tools}:
        fields.refuse("tool_choice", "tool_choice.function.name is not among the tools", got=shown(name))
    return Tools(tools, choice, name)


def _only(tools: tuple[Mapping[str, Any], ...], allowed: set[str], fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """Leave those that may be called, as if there were no others."""
    for name in sorted(allowed - {tool[_FUNCTION]["name"] for tool in tools}):
        fields.refuse("tool_choice", "tool_choice allows a function that is not among the tools", got=shown(name))
    return tuple(tool for tool in tools if tool[_FUNCTION]["name"] in allowed)


def _read_choice(fields: Fields) -> tuple[str, str, set[str] | None]:
    """Give the choice, the one function that it may name, and those that it allows, None for all."""
    value = fields.word("tool_choice")
    if value is None:
        return "auto", "", None
    if isinstance(value, str):
        if value in _CHOICES:
            return value, "", None
        said = "tool_choice should be either 'none' or 'auto' or 'required'"
        fields.refuse("tool_choice", said, got=shown(value))
        return "auto", "", None
    chosen = fields.within("tool_choice", "tool_choice is not a valid JSON object or string")
    if chosen is None:
        return "auto", "", None
    if chosen.word("type") == _ALLOWED:
        return _read_allowed(chosen)
    return *_read_named(chosen), None


def _read_allowed(chosen: Fields) -> tuple[str, str, set[str]]:
    """Read a choice among some of the tools, which chat has in an object of its own."""
    holder = chosen if chosen.get(_ALLOWED) is None else chosen.within(_ALLOWED)
    if holder is None:
        return "auto", "", set()
    mode = holder.word("mode")
    if mode not in {"auto", "required"}:
        holder.refuse("mode", f"{holder.path('mode')} should be either 'auto' or 'required'", got=shown(mode))
        return "auto", "", set()
    tools = [_read_tool(tool) for tool in holder.objects("tools")]
    return mode, "", {tool[_FUNCTION]["name"] for tool in tools}


def _read_named(chosen: Fields) -> tuple[str, str]:
    """Read the one function that is to be called."""
    # The Responses API has the name where chat has an object with it.
    is_flat = chosen.get(_FUNCTION) is None and chosen.get("type") == _FUNCTION
    named = chosen if is_flat else chosen.within(_FUNCTION, "tool_choice.function is not a valid JSON object")
    if named is None:
        if chosen.get(_FUNCTION) is None:
            chosen.refuse(_FUNCTION, "tool_choice.function is not a valid JSON object")
        return "auto", ""
    name = named.word("name")
    if not isinstance(name, str) or not name:
        named.refuse("name", f"{named.path('name')} is not a valid string", got=shown(name))
        return "auto", ""
    return _FUNCTION, name


def _read_tool(fields: Fields) -> Mapping[str, Any]:
    """Read a tool in the form of chat, or of the Responses API, which has everything on one level."""
    kind = fields.name_text("type")
    if kind not in {None, _FUNCTION}:
        fields.refuse("type", "Only function tools are supported", got=shown(kind), code="unsupported_parameter")
        return {"type": _FUNCTION, _FUNCTION: {"name": ""}}
    is_flat = fields.get(_FUNCTION) is None and fields.get("name") is not None
    function = fields if is_flat else fields.within(_FUNCTION)
    if function is None:
        if fields.get(_FUNCTION) is None:
            fields.refuse(_FUNCTION, f"{fields.path(_FUNCTION)} is missing")
        return {"type": _FUNCTION, _FUNCTION: {"name": ""}}
    return {"type": _FUNCTION, _FUNCTION: _read_function(function)}


def _read_function(fields: Fields) -> Mapping[str, Any]:
    name = fields.name_text("name")
    if not fields.get("name"):
        fields.refuse("name", f"{fields.path('name')} is missing")
    fields.prompt.add(len(name or ""))
    function: dict[str, Any] = {"name": name or ""}
    description = fields.prompt_text("description")
    if description is not None:
        function["description"] = description
    # Templates ask for them without looking whether they are there.
    function["parameters"] = fields.mapping("parameters", is_prompt=True) or {"type": "object", "properties": {}}
    strict = fields.flag("strict")
    if strict is not None:
        function["strict"] = strict
    return function
