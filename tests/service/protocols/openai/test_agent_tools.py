"""Tools of agents in the Responses API: functions of the prompt, items of calls, and results in the input."""

from __future__ import annotations

import json
from typing import Any, Final

from ovmstrio.core.generation import Conversation, Finish, GenerationChunk, ToolCallDelta
from tests.service.protocols.openai.servers import CHAT, events_of, service_of
from tests.unit.protocols.servers import Serving

PATH: Final = "/v1/responses"
GRAMMAR: Final = {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}
TOOLS: Final[dict[str, dict[str, Any]]] = {
    "local_shell": {"type": "local_shell"},
    "shell": {"type": "shell"},
    "apply_patch": {"type": "apply_patch"},
    "note": {"type": "custom", "name": "note", "description": "Take a note.", "format": GRAMMAR},
    "mail__send": {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]},
}
CALLS: Final[list[tuple[str, dict[str, Any], dict[str, Any]]]] = [
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5, "working_directory": "/w"},
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 5,
                "user": None,
                "working_directory": "/w",
            },
        },
    ),
    (
        "shell",
        {"commands": ["ls", "pwd"]},
        {"type": "shell_call", "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}},
    ),
    (
        "apply_patch",
        {"operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}},
    ),
    (
        "apply_patch",
        {"operation": {"type": "delete_file", "path": "a.py", "diff": ""}},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.py"}},
    ),
    ("note", {"input": "a\nb"}, {"type": "custom_tool_call", "name": "note", "input": "a\nb"}),
    (
        "mail__send",
        {"to": "ann"},
        {"type": "function_call", "name": "send", "namespace": "mail", "arguments": '{"to": "ann"}'},
    ),
]


def _calls(name: str, arguments: dict[str, Any]) -> list[GenerationChunk]:
    text = json.dumps(arguments)
    parts = [ToolCallDelta(0, "call_1", name, text[:5]), ToolCallDelta(0, arguments=text[5:])]
    chunks = [GenerationChunk(calls=(part,), tokens=1) for part in parts]
    return [*chunks, GenerationChunk(finish=Finish.TOOL_CALLS)]


async def _post(serving: Serving, **fields: Any) -> Any:
    answer = await serving.post(PATH, json={"model": CHAT, "input": "go", **fields})
    assert answer.status_code == 200, answer.text
    return answer


def _prompt(serving: Serving) -> Conversation:
    prompt = service_of(serving).requests[-1].prompt
    assert isinstance(prompt, Conversation)
    return prompt


async def test_a_call_is_an_item_of_its_tool_and_returns_as_the_same_call(serving: Serving) -> None:
    for name, arguments, expected in CALLS:
        service_of(serving).script = lambda _, call=(name, arguments): _calls(*call)
        document = (await _post(serving, tools=[TOOLS[name]])).json()
        (item,) = document["output"]
        assert {key: item[key] for key in expected} == expected
        assert (item["call_id"], item["status"]) == ("call_1", "completed")
        assert document["tools"][0]["type"] == TOOLS[name]["type"]
        assert [tool["function"]["name"] for tool in _prompt(serving).tools] == [name]
        result = {"type": f"{item['type']}_output", "call_id": "call_1", "output": "done"}
        await _post(serving, tools=[TOOLS[name]], input=[{"role": "user", "content": "go"}, item, result])
        _, call, output = _prompt(serving).messages
        assert output == {"role": "tool", "tool_call_id": "call_1", "content": "done"}
        function = call["tool_calls"][0]["function"]
        assert function["name"] == name
        # A deletion has no diff.
        wanted = {"operation": expected["operation"]} if name == "apply_patch" else arguments
        assert json.loads(function["arguments"]).items() >= wanted.items()


async def test_the_events_of_calls_are_those_of_their_tools(serving: Serving) -> None:
    expected = {
        "note": ["custom_tool_call_input.delta", "custom_tool_call_input.done"],
        "shell": ["shell_call_command.added", "shell_call_command.done"] * 2,
        "local_shell": [],
        "mail__send": [
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
        ],
    }
    for name, arguments, item in CALLS:
        if name not in expected:
            continue
        service_of(serving).script = lambda _, call=(name, arguments): _calls(*call)
        events = events_of((await _post(serving, tools=[TOOLS[name]], stream=True)).text)[:-1]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds == [
            "created",
            "in_progress",
            "output_item.added",
            *expected[name],
            "output_item.done",
            "completed",
        ]
        done = events[-2]["item"]
        assert {key: done[key] for key in item} == item


async def test_a_truncated_call_of_a_custom_tool_has_the_text_so_far(serving: Serving) -> None:
    call = ToolCallDelta(0, "call_1", "note", '{"input": "ab')
    service_of(serving).script = lambda _: [GenerationChunk(calls=(call,), finish=Finish.LENGTH)]
    (item,) = (await _post(serving, tools=[TOOLS["note"]])).json()["output"]
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", '{"input": "ab')


async def test_a_patch_of_no_known_type_is_an_update(serving: Serving) -> None:
    kinds: tuple[Any, ...] = ("move_file", ["create_file"], {}, None)
    for kind in kinds:
        operation = {"type": kind, "path": "a.py", "diff": "+b"}
        service_of(serving).script = lambda _, call=operation: _calls("apply_patch", {"operation": call})
        (item,) = (await _post(serving, tools=[TOOLS["apply_patch"]])).json()["output"]
        assert item["operation"] == operation | {"type": "update_file"}


async def test_the_grammar_of_a_custom_tool_is_described_to_the_model(serving: Serving) -> None:
    await _post(serving, tools=[TOOLS["note"]], tool_choice={"type": "custom", "name": "note"})
    prompt = _prompt(serving)
    (tool,) = prompt.tools
    assert tool["function"]["description"] == "Take a note."
    assert "(lark):\nstart: /[a-z]+/" in tool["function"]["parameters"]["properties"]["input"]["description"]
    assert (prompt.tool_choice, prompt.tool_name) == ("function", "note")


async def test_tools_of_an_input_item_are_tools_of_the_request(serving: Serving) -> None:
    service_of(serving).script = lambda _: _calls("work__note", {"input": "x"})
    space = {"type": "namespace", "name": "work", "tools": [TOOLS["note"]]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [space, {"type": "web_search"}]},
        {"role": "user", "content": "go"},
    ]
    document = (await _post(serving, input=items, tools=[TOOLS["shell"]])).json()
    prompt = _prompt(serving)
    assert [tool["function"]["name"] for tool in prompt.tools] == ["shell", "work__note"]
    assert [message["content"] for message in prompt.messages] == ["go"]
    (item,) = document["output"]
    assert (item["type"], item["name"], item["namespace"], item["input"]) == ("custom_tool_call", "note", "work", "x")
    await _post(serving, input=[*items, item])
    (call,) = _prompt(serving).messages[-1]["tool_calls"]
    assert call["function"] == {"name": "work__note", "arguments": '{"input": "x"}'}


async def test_tools_of_an_input_item_have_places_and_may_be_chosen(serving: Serving) -> None:
    send = {"type": "function", "name": "send", "parameters": {"type": "object"}, "strict": True}
    items = [{"role": "user", "content": "go"}, {"type": "additional_tools", "tools": [send, TOOLS["note"]]}]
    await _post(serving, input=items, tools=[TOOLS["shell"]], tool_choice={"type": "function", "name": "send"})
    prompt = _prompt(serving)
    assert (prompt.tool_choice, prompt.tool_name) == ("function", "send")
    places = ("tools[0].parameters", "input[1].tools[0].parameters", "input[1].tools[1].parameters")
    assert prompt.parameters_fields == places
    await _post(serving, input=items, tool_choice="required")
    assert _prompt(serving).parameters_fields == places[1:]


async def test_a_choice_may_name_a_built_in_tool(serving: Serving) -> None:
    document = (await _post(serving, tools=[TOOLS["shell"]], tool_choice={"type": "shell"})).json()
    assert (_prompt(serving).tool_choice, _prompt(serving).tool_name) == ("function", "shell")
    assert document["tool_choice"] == {"type": "shell"}


async def test_tools_of_openais_servers_are_left_out(serving: Serving) -> None:
    for kind in ("web_search", "web_search_preview_2025_03_11", "image_generation", "tool_search"):
        answer = await _post(serving, tools=[{"type": kind}, TOOLS["note"]], include=["web_search_call.action.sources"])
        assert [tool["type"] for tool in answer.json()["tools"]] == ["custom"]
        assert [tool["function"]["name"] for tool in _prompt(serving).tools] == ["note"]


REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "Only function tools are supported"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name is missing"),
    ({"tools": [{"type": "custom", "name": "n", "format": {"type": "x"}}]}, "type should be one of text, grammar"),
    ({"tools": [{"type": "custom", "name": "n", "format": {"type": "grammar"}}]}, "format.definition is missing"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": 5}]}, "tools[0].tools is not an array"),
    ({"tool_choice": {"type": "shell"}}, "tool_choice is only allowed when tools are specified"),
    ({"tools": [TOOLS["note"]], "tool_choice": {"type": "shell"}}, "is not among the tools; got 'shell'"),
    ({"input": [{"type": "custom_tool_call", "input": "a"}]}, "input[0].name is missing"),
    ({"input": [{"type": "mcp_call", "name": "a"}]}, "Unsupported input item type; got 'mcp_call'"),
    ({"include": ["everything"]}, "include: unknown value; got 'everything'"),
]


async def test_invalid_tools_and_items_are_refused(serving: Serving) -> None:
    for fields, message in REFUSED:
        answer = await serving.post(PATH, json={"model": CHAT, "input": "go", **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert message in answer.json()["error"]["message"]


async def test_results_of_commands_and_patches_become_text(serving: Serving) -> None:
    outputs = [
        {"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 2}},
        {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
    ]
    items = [
        {"type": "shell_call_output", "call_id": "c1", "output": outputs},
        {"type": "apply_patch_call_output", "call_id": "c2", "status": "failed"},
    ]
    await _post(serving, input=items)
    texts = [message["content"] for message in _prompt(serving).messages]
    assert texts == ["a\n\nb\nexit code: 2\ntime limit exceeded", "failed"]


async def test_earlier_reasoning_belongs_to_the_next_message_of_the_assistant(serving: Serving) -> None:
    summary = [{"type": "summary_text", "text": "sum"}]
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": summary, "content": [{"type": "reasoning_text", "text": "raw"}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "reasoning", "id": "rs_2", "summary": summary, "encrypted_content": None},
        {"role": "user", "content": "c"},
    ]
    await _post(serving, input=items, include=["reasoning.encrypted_content"])
    assert [message.get("reasoning_content") for message in _prompt(serving).messages] == [None, "raw", None]
