"""Tools of agents in the Responses API: the functions that the model sees, and the items of calls and results.

::

    tools  ─> function tools of the prompt           custom, local_shell, shell, apply_patch, namespace
    items  ─> messages with tool calls and results   calls of these tools in the input
    calls  ─> items of the tool's type               calls of the model

The client runs all of these tools.  Tools that only OpenAI's servers run are ignored (:data:`IGNORED_TOOLS`) or
refused.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from ovmstrio.protocols.openai.fields import Fields, content_text, read_function_tool, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# ----------------------------------------------------------------------
# Built-in tools as functions
# ----------------------------------------------------------------------

_STRINGS: Final = {"type": "array", "items": {"type": "string"}}
_INTEGER: Final = {"type": "integer"}


def _function(name: str, description: str, required: tuple[str, ...], **properties: Any) -> Mapping[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_BUILT_IN: Final[Mapping[str, Mapping[str, Any]]] = {
    "local_shell": _function(
        "local_shell",
        "Run a program on the user's computer and return its output.",
        ("command",),
        command={**_STRINGS, "description": "The program and its arguments."},
        working_directory={"type": "string", "description": "The directory in which the program runs."},
        timeout_ms={**_INTEGER, "description": "Time limit in milliseconds."},
    ),
    "shell": _function(
        "shell",
        "Run shell commands and return their output.",
        ("commands",),
        commands={**_STRINGS, "description": "The commands, which run one after the other."},
        timeout_ms={**_INTEGER, "description": "Time limit in milliseconds."},
        max_output_length={**_INTEGER, "description": "Maximum characters of the output."},
    ),
    "apply_patch": _function(
        "apply_patch",
        "Create, update or delete one file.",
        ("operation",),
        operation={
            "type": "object",
            "properties": {
                "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                "path": {"type": "string", "description": "Path of the file."},
                "diff": {
                    "type": "string",
                    "description": "Unified diff of the file without its header; empty for delete_file.",
                },
            },
            "required": ["type", "path"],
            "additionalProperties": False,
        },
    ),
}
"""Functions for the built-in tools that clients run, by type."""

IGNORED_TOOLS: Final = frozenset({"web_search", "web_search_preview", "image_generation", "tool_search"})
"""Tools that agents offer with every request and that only OpenAI's servers run.  The model does without them."""

_CUSTOM: Final = "custom"
_NAMESPACE: Final = "namespace"
_SEPARATOR: Final = "__"
"""Separator of a namespace and a name in the function's name."""
_GRAMMARS: Final = ("lark", "regex")


def read_agent_tool(fields: Fields) -> list[Mapping[str, Any]]:
    """Return the functions of one tool: none for an ignored tool, several for a namespace."""
    kind = fields.word("type")
    if not isinstance(kind, str) or kind.partition("_20")[0] in {"web_search", "web_search_preview"}:
        # The names of web search have dates.
        return [] if isinstance(kind, str) else [read_function_tool(fields)]
    if kind in IGNORED_TOOLS:
        return []
    if kind != "function":
        # The response repeats the tool.
        fields.check_levels()
    if kind in _BUILT_IN:
        return [_BUILT_IN[kind]]
    if kind == _CUSTOM:
        return [_read_custom(fields)]
    if kind != _NAMESPACE:
        return [read_function_tool(fields)]
    name = fields.name_text("name")
    if not name:
        fields.refuse("name", f"{fields.path('name')} is missing")
    return [_within(name or "", each) for tool in fields.objects("tools") for each in _read_inner(tool)]


def _read_inner(fields: Fields) -> list[Mapping[str, Any]]:
    return [_read_custom(fields)] if fields.word("type") == _CUSTOM else [read_function_tool(fields)]


def _within(namespace: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool["function"]
    return {**tool, "function": {**function, "name": model_name(function["name"], namespace)}}


def model_name(name: str, namespace: str) -> str:
    """Return the name of a function that the model sees."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def _read_custom(fields: Fields) -> Mapping[str, Any]:
    name = fields.name_text("name")
    if not name:
        fields.refuse("name", f"{fields.path('name')} is missing")
    description = fields.prompt_text("description") or ""
    fields.prompt.add(len(name or ""))
    form = fields.within("format")
    text = "The input of the tool, as text."
    if form is not None and form.choice("type", ("text", "grammar")) == "grammar":
        syntax = form.choice("syntax", _GRAMMARS)
        definition = form.prompt_text("definition")
        for missing, value in (("syntax", syntax), ("definition", definition)):
            if form.get(missing) is None or value == "":
                form.refuse(missing, f"{form.path(missing)} is missing")
        text = f"The input of the tool, as text that follows this grammar ({syntax}):\n{definition}"
    return _function(name or "", description, ("input",), input={"type": "string", "description": text})


# ----------------------------------------------------------------------
# Calls of the model as output items
# ----------------------------------------------------------------------


def _arguments(text: str) -> dict[str, Any]:
    try:
        read = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def custom_input(text: str) -> str:
    """Return the input of a custom tool from a call's arguments; incomplete arguments are the input themselves."""
    value = _arguments(text).get("input")
    return value if isinstance(value, str) else text


def _local_shell(text: str) -> Mapping[str, Any]:
    given = _arguments(text)
    directory = given.get("working_directory")
    action: dict[str, Any] = {
        "type": "exec",
        "command": _strings(given.get("command")),
        "env": {},
        "timeout_ms": _integer(given.get("timeout_ms")),
        "user": None,
        "working_directory": directory if isinstance(directory, str) else None,
    }
    return {"action": action}


def _shell(text: str) -> Mapping[str, Any]:
    given = _arguments(text)
    limits = {name: _integer(given.get(name)) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": _strings(given.get("commands")), **limits}}


def _apply_patch(text: str) -> Mapping[str, Any]:
    found = _arguments(text).get("operation")
    given = found if isinstance(found, dict) else {}
    kind = given.get("type") if given.get("type") in ("create_file", "delete_file") else "update_file"
    operation = {"type": kind, "path": str(given.get("path") or "")}
    return {"operation": operation if kind == "delete_file" else {**operation, "diff": str(given.get("diff") or "")}}


class CallForm(NamedTuple):
    """Item of a tool call: prefix of its id, type, and its fields by the arguments of the function call."""

    prefix: str
    type: str
    fields: Callable[[str], Mapping[str, Any]]


FUNCTION_CALL: Final = CallForm("fc", "function_call", lambda text: {"arguments": text})
CUSTOM_CALL: Final = CallForm("ctc", "custom_tool_call", lambda text: {"input": custom_input(text)})
SHELL_CALL: Final = CallForm("sh", "shell_call", _shell)
_FORMS: Final[Mapping[str, CallForm]] = {
    "local_shell": CallForm("lsh", "local_shell_call", _local_shell),
    "shell": SHELL_CALL,
    "apply_patch": CallForm("apc", "apply_patch_call", _apply_patch),
}


class ClientTool(NamedTuple):
    """Tool as its client knows it: form of its calls, and name and namespace in the items of calls."""

    form: CallForm
    names: Mapping[str, str]


ADDITIONAL_TOOLS: Final = "additional_tools"
"""Type of an input item with further tools."""


class ClientTools:
    """Tools of one valid body and of its input items, by the names of their functions.

    Attributes:
        documents: tools as the response repeats them, without ignored ones.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.documents: list[Mapping[str, Any]] = []
        self._tools: dict[str, ClientTool] = {}
        given = document.get("input")
        items = given if isinstance(given, list) else ()
        further = (item["tools"] for item in items if item.get("type") == ADDITIONAL_TOOLS and item.get("tools"))
        for tool in chain(document.get("tools") or (), *further):
            self._add(tool)

    def find(self, function: str) -> ClientTool:
        """Return the tool of a function; any other name is that of a function."""
        return self._tools.get(function) or ClientTool(FUNCTION_CALL, {"name": function})

    def _add(self, tool: Mapping[str, Any]) -> None:
        kind: Any = tool.get("type")
        if kind in _FORMS:
            self._tools[kind] = ClientTool(_FORMS[kind], {})
            self.documents.append(tool)
        elif kind == _CUSTOM:
            self._tools[tool["name"]] = _client_tool(tool)
            self.documents.append(tool)
        elif kind == _NAMESPACE:
            space = tool["name"]
            for inner in tool.get("tools") or ():
                made = _client_tool(inner)
                names = {**made.names, "namespace": space}
                self._tools[model_name(names["name"], space)] = made._replace(names=names)
            self.documents.append(tool)
        elif kind in {None, "function"}:
            function = tool if tool.get("function") is None else tool["function"]
            shown_fields = {name: function[name] for name in ("name", "description", "strict") if name in function}
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            document = {"type": "function", "description": None, "strict": False, **shown_fields}
            self.documents.append({**document, "parameters": parameters})


def _client_tool(tool: Mapping[str, Any]) -> ClientTool:
    if tool.get("type") == _CUSTOM:
        return ClientTool(CUSTOM_CALL, {"name": tool["name"]})
    function = tool if tool.get("function") is None else tool["function"]
    return ClientTool(FUNCTION_CALL, {"name": function["name"]})


# ----------------------------------------------------------------------
# Input items as messages
# ----------------------------------------------------------------------

_IGNORED_ITEMS: Final = frozenset(
    {"web_search_call", "image_generation_call", "tool_search_call", "tool_search_output"}
)
"""Items of ignored tools, in conversations that began on another server."""


class MessageList:
    """Messages of a conversation, to which input items are added in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""

    def add(self, message: dict[str, Any]) -> None:
        """Add a message; earlier reasoning belongs to the next message of the assistant."""
        if message["role"] == "assistant" and self._reasoning:
            message |= dict.fromkeys(("reasoning_content", "reasoning"), self._reasoning)
        self._reasoning = ""
        self.messages.append(message)

    def add_item(self, kind: Any, item: Fields) -> None:
        """Add an item other than a message."""
        if not isinstance(kind, str):
            item.refuse("type", "Unsupported input item type", got=shown(kind))
        elif kind in _CALLS:
            self._add_call(item, *_CALLS[kind](item))
        elif kind in _OUTPUTS:
            call_id = item.prompt_text("call_id") or item.prompt_text("id") or ""
            self.add({"role": "tool", "tool_call_id": call_id, "content": _OUTPUTS[kind](item)})
        elif kind == "reasoning":
            self._reasoning = "\n".join(filter(None, (self._reasoning, _reasoning_text(item))))
        elif kind not in _IGNORED_ITEMS:
            item.refuse("type", "Unsupported input item type", got=shown(kind))

    def _add_call(self, item: Fields, name: str, arguments: str) -> None:
        call_id = item.prompt_text("call_id") or item.text("id") or ""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        if not self.messages or self.messages[-1]["role"] != "assistant" or self._reasoning:
            self.add({"role": "assistant", "content": ""})
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _reasoning_text(item: Fields) -> str:
    """Return the reasoning of an item: its content, or else its summary."""
    for name in ("content", "summary"):
        texts = [part.prompt_text("text") or "" for part in item.objects(name)]
        if any(texts):
            return "\n".join(texts)
    return ""


def _dump(value: Mapping[str, Any]) -> str:
    # orjson takes no lone surrogates, which a body may have.
    return json.dumps(value, ensure_ascii=False)


def _named_call(item: Fields, field: str) -> tuple[str, str]:
    name, value = item.prompt_text("name"), item.prompt_text(field)
    if not name:
        item.refuse("name", f"{item.path('name')} is missing")
    return model_name(name or "", item.name_text("namespace") or ""), value or ""


def _custom_call(item: Fields) -> tuple[str, str]:
    name, value = _named_call(item, "input")
    return name, _dump({"input": value})


def _function_call(item: Fields) -> tuple[str, str]:
    name, arguments = _named_call(item, "arguments")
    return name, arguments or "{}"


def _object_call(name: str, field: str, *, is_inner: bool = False) -> Callable[[Fields], tuple[str, str]]:
    """Return the reader of a built-in tool's call, whose object is the arguments or one of them."""

    def read(item: Fields) -> tuple[str, str]:
        given = {key: value for key, value in (item.mapping(field, is_prompt=True) or {}).items() if value is not None}
        given.pop("type", None) if not is_inner else None
        return name, _dump({field: given} if is_inner else given)

    return read


_CALLS: Final[Mapping[str, Callable[[Fields], tuple[str, str]]]] = {
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _object_call("local_shell", "action"),
    "shell_call": _object_call("shell", "action"),
    "apply_patch_call": _object_call("apply_patch", "operation", is_inner=True),
}
"""Function name and arguments of a call, by the item's type."""


def _shell_output(item: Fields) -> str:
    value = item.get("output")
    return content_text(item, "output") if isinstance(value, str) else "\n".join(_command_outputs(item))


def _command_outputs(item: Fields) -> Iterator[str]:
    for part in item.objects("output"):
        yield from filter(None, (part.prompt_text("stdout"), part.prompt_text("stderr")))
        outcome = part.within("outcome")
        if outcome is not None and outcome.get("exit_code") is not None:
            yield f"exit code: {outcome.integer('exit_code', 'exit_code is not an integer')}"
        elif outcome is not None and outcome.word("type") == "timeout":
            yield "time limit exceeded"


def _patch_output(item: Fields) -> str:
    return content_text(item, "output") or item.name_text("status") or ""


_OUTPUTS: Final[Mapping[str, Callable[[Fields], str]]] = {
    "function_call_output": lambda item: content_text(item, "output"),
    "custom_tool_call_output": lambda item: content_text(item, "output"),
    "local_shell_call_output": lambda item: content_text(item, "output"),
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
}
"""Text of a tool's result, by the item's type."""
