from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import InvalidField, InvalidRequest
from ovmstrio.core.generation import Conversation, Finish, GenerationRequest, Grammar, GrammarKind, Piece, Sampling
from ovmstrio.runtimes.generation.text_model import TextModel
from tests.support.model_hosts import HostOf, ModelHost, on_model_loop, with_settings
from tests.support.served_text_models import made, text_of
from tests.support.tiny_llm import CHAT_TEMPLATE
from tests.system.runtimes.generation.conftest import ServeTiny

_FLAGS: Final = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
_TOOLS: Final = (
    {"type": "function", "function": {"name": "measure", "parameters": _FLAGS}},
    {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}},
)
_HELLO: Final = ({"role": "user", "content": "hello"},)


def _saying(text: str) -> Grammar:
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(form))


def _request(grammar: Grammar | None = None, seed: int = 0, **conversation: Any) -> GenerationRequest:
    sampling = Sampling(max_tokens=400, temperature=1.5, seed=seed)
    return GenerationRequest(Conversation(_HELLO, **conversation), sampling, grammar=grammar)


def _calls(pieces: list[Piece]) -> list[tuple[str, str]]:
    deltas = [call for piece in pieces for call in piece.calls]
    names = [delta.name for delta in deltas if delta.name]
    return [
        (name, "".join(delta.arguments for delta in deltas if delta.index == number))
        for number, name in enumerate(names)
    ]


@on_model_loop
async def test_calls_and_reasoning_are_parsed(model: TextModel) -> None:
    written = (
        "<think>\nhm, so\n</think>\n\nI look. <tool_call>\n"
        '{"name": "measure", "arguments": {"size": 1}}\n</tool_call>'
        '<tool_call>{"name": "rest", "arguments": {}}</tool_call>'
    )
    model = with_settings(model, tool_parser="hermes3", reasoning_parser="qwen3")
    pieces = await made(model, _request(_saying(written), tools=_TOOLS))
    assert text_of(pieces) == "I look."
    assert "".join(piece.reasoning for piece in pieces) == "hm, so"
    assert _calls(pieces) == [("measure", '{"size": 1}'), ("rest", "{}")]
    assert pieces[-1].finish is Finish.TOOL_CALLS
    assert sum(piece.tokens for piece in pieces) > 100
    reasoning_tokens = sum(piece.reasoning_tokens for piece in pieces)
    assert len("<think>\nhm, so\n</think>") - 10 < reasoning_tokens < len("<think>\nhm, so\n</think>\n\n") + 1
    once = await made(model, _request(_saying(written), tools=_TOOLS, calls_once=True))
    assert (_calls(once), once[-1].finish) == ([("measure", '{"size": 1}')], Finish.TOOL_CALLS)
    without = await made(model, _request(_saying("<tool_call>{} is a tag")))
    assert text_of(without) == "<tool_call>{} is a tag"
    assert without[-1].finish is Finish.STOP


@pytest.mark.parametrize(
    ("template", "settings", "written", "content", "reasoning", "calls"),
    [
        pytest.param(
            CHAT_TEMPLATE + "{# calls are <tool_call>{...}</tool_call> #}",
            {"tool_parser": "auto"},
            '<tool_call>{"name": "rest", "arguments": {}}</tool_call>',
            "",
            "",
            [("rest", "{}")],
            id="chooses the parser",
        ),
        pytest.param(
            CHAT_TEMPLATE + "<think>\n{% if tools %}{% endif %}",
            {"tool_parser": "hermes3", "reasoning_parser": "qwen3"},
            "why\n</think>\nso",
            "so",
            "why",
            [],
            id="begins reasoning",
        ),
    ],
)
async def test_template_of_the_folder_decides_how_answers_are_read(
    serve_tiny: ServeTiny,
    tiny_folder: Path,
    tmp_path: Path,
    template: str,
    settings: dict[str, str],
    written: str,
    content: str,
    reasoning: str,
    calls: list[tuple[str, str]],
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    async with serve_tiny(base_path=folder, path=folder, **settings) as model:
        pieces = await made(model, _request(_saying(written), tools=_TOOLS))
    assert (text_of(pieces), _calls(pieces)) == (content, calls)
    assert "".join(piece.reasoning for piece in pieces) == reasoning


@on_model_loop
async def test_constrained_text_may_end_with_its_first_token(model: TextModel) -> None:
    shortest = GenerationRequest("hello", Sampling(max_tokens=1), grammar=_saying("fine"))
    with trio.fail_after(60):
        (piece,) = await made(model, shortest)
    assert (piece.tokens, piece.finish) == (1, Finish.LENGTH)


@pytest.mark.parametrize("tool_parser", ["hermes3", "", "mistral", "qwen3coder", "gptoss", "lfm2"])
@on_model_loop
async def test_named_function_is_called_with_arguments_of_its_schema(model: TextModel, tool_parser: str) -> None:
    model = with_settings(model, tool_parser=tool_parser)
    for seed in range(20):
        pieces = await made(model, _request(seed=seed, tools=_TOOLS, tool_choice="function", tool_name="measure"))
        (call,) = _calls(pieces)
        assert call[0] == "measure"
        assert text_of(pieces) == ""
        if pieces[-1].finish is Finish.TOOL_CALLS:
            assert json.loads(call[1])["size"] in {1, 2}
            return
    pytest.fail("no call ended")


@on_model_loop
async def test_invalid_grammar_is_refused_with_its_place(model: TextModel) -> None:
    bad = {"type": "object", "properties": {"size": {"type": "int"}}}
    tool = {"type": "function", "function": {"name": "bad", "parameters": bad}}
    with pytest.raises(InvalidField, match=r"at \$.properties.size.type: expected one of string") as refused:
        await made(model, _request(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(bad))))
    assert refused.value.field == "response_format"
    with pytest.raises(InvalidField, match=r"tools\[0\].function.parameters: at \$.properties.size.type"):
        await made(model, _request(tools=(tool,), tool_choice="required"))
    assert text_of(await made(model, _request(_saying("fine")))) == "fine"


@on_model_loop
async def test_texts_with_special_tokens_are_complete(model: TextModel) -> None:
    written = "abcdefghijklmnopqrstuvwxyz" * 4
    pieces = await made(model, replace(_request(_saying(written)), skips_special_tokens=False))
    assert text_of(pieces) == written


_LOOPS: Final = (
    "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}\n{% if messages | length > 1 %}{{ raise_exception('one is enough') }}{% endif %}"
)
_COMPARES_FOR_EVER: Final = (
    "{% if messages[0].content == 'hostile' %}{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}{% endif %}"
)


@pytest.fixture(scope="module")
def odd_model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, host_of: HostOf) -> ModelHost:
    folder = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(_LOOPS + _COMPARES_FOR_EVER + "hello")
    return host_of(base_path=folder, path=folder)


@on_model_loop
async def test_template_that_loops_or_refuses_fails_its_request(odd_model: TextModel) -> None:
    asked = _request(_saying("fine"))
    for messages, said in (
        (({"role": "user", "content": "loop"},), "line 1: it loops for too long"),
        (_HELLO * 2, "line 2: one is enough"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            await made(odd_model, GenerationRequest(Conversation(messages), asked.sampling))
    assert text_of(await made(odd_model, asked)) == "fine"


@on_model_loop
async def test_other_requests_go_on_while_a_template_runs_too_long(odd_model: TextModel) -> None:
    hostile = GenerationRequest(
        Conversation(({"role": "user", "content": "hostile"},)), _request(_saying("fine")).sampling
    )
    ends: list[str] = []

    async def fail() -> None:
        with pytest.raises(InvalidRequest, match=r"chat_template\.jinja used more than 2 s of CPU time"):
            await made(odd_model, hostile)
        ends.append("hostile")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        await trio.testing.wait_all_tasks_blocked()
        assert await made(odd_model, GenerationRequest("fine", Sampling(max_tokens=20)))
        ends.append("text")
    assert ends == ["text", "hostile"]
    assert text_of(await made(odd_model, _request(_saying("fine")))) == "fine"
