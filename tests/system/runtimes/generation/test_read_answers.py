"""Texts of a real engine come as content, reasoning and calls, in the forms that were asked for."""

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
from tests.support.tiny_llm import CHAT_TEMPLATE
from tests.system.runtimes.generation.conftest import ServeTiny

_FLAGS: Final = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
_TOOLS: Final = (
    {"type": "function", "function": {"name": "measure", "parameters": _FLAGS}},
    {"type": "function", "function": {"name": "rest", "parameters": {"type": "object", "properties": {}}}},
)
_HELLO: Final = ({"role": "user", "content": "hello"},)


def _said(text: str) -> Grammar:
    """Make the model say just this."""
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(form))


def _asked(grammar: Grammar | None = None, seed: int = 0, **conversation: Any) -> GenerationRequest:
    sampling = Sampling(max_tokens=400, temperature=1.5, seed=seed)
    return GenerationRequest(Conversation(_HELLO, **conversation), sampling, grammar=grammar)


async def _pieces(model: TextModel, asked: GenerationRequest) -> list[Piece]:
    async with model.generate(asked) as generation:
        return [piece async for piece in generation]


def _calls(pieces: list[Piece]) -> list[tuple[str, str]]:
    deltas = [call for piece in pieces for call in piece.calls]
    names = [delta.name for delta in deltas if delta.name]
    return [
        (name, "".join(delta.arguments for delta in deltas if delta.index == number))
        for number, name in enumerate(names)
    ]


def _text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@on_model_loop
async def test_calls_and_reasoning_are_taken_out_of_the_text(model: TextModel) -> None:
    """And a text that calls ends for that reason."""
    written = (
        "<think>\nhm, so\n</think>\n\nI look. <tool_call>\n"
        '{"name": "measure", "arguments": {"size": 1}}\n</tool_call>'
        '<tool_call>{"name": "rest", "arguments": {}}</tool_call>'
    )
    model = with_settings(model, tool_parser="hermes3", reasoning_parser="qwen3")
    pieces = await _pieces(model, _asked(_said(written), tools=_TOOLS))
    assert _text(pieces) == "I look."
    assert "".join(piece.reasoning for piece in pieces) == "hm, so"
    assert _calls(pieces) == [("measure", '{"size": 1}'), ("rest", "{}")]
    assert pieces[-1].finish is Finish.TOOL_CALLS
    assert sum(piece.tokens for piece in pieces) > 100
    reasoning_tokens = sum(piece.reasoning_tokens for piece in pieces)
    assert len("<think>\nhm, so\n</think>") - 10 < reasoning_tokens < len("<think>\nhm, so\n</think>\n\n") + 1
    once = await _pieces(model, _asked(_said(written), tools=_TOOLS, calls_once=True))
    assert (_calls(once), once[-1].finish) == ([("measure", '{"size": 1}')], Finish.TOOL_CALLS)
    without = await _pieces(model, _asked(_said("<tool_call>{} is a tag")))
    assert _text(without) == "<tool_call>{} is a tag"
    assert without[-1].finish is Finish.STOP


async def test_the_template_that_renders_says_which_parser_reads(
    serve_tiny: ServeTiny, tiny_folder: Path, tmp_path: Path
) -> None:
    """That of the folder, where the tokenizer has another one."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "{# calls are <tool_call>{...}</tool_call> #}")
    written = '<tool_call>{"name": "rest", "arguments": {}}</tool_call>'
    async with serve_tiny(base_path=folder, path=folder, tool_parser="auto") as model:
        pieces = await _pieces(model, _asked(_said(written), tools=_TOOLS))
    assert (_text(pieces), _calls(pieces)) == ("", [("rest", "{}")])


@on_model_loop
async def test_a_text_that_must_have_a_form_may_end_with_its_first_token(model: TextModel) -> None:
    """The engine knows of a form only behind its first step whether the library takes it."""
    shortest = GenerationRequest("hello", Sampling(max_tokens=1), grammar=_said("fine"))
    with trio.fail_after(60):
        (piece,) = await _pieces(model, shortest)
    assert (piece.tokens, piece.finish) == (1, Finish.LENGTH)


@pytest.mark.parametrize("tool_parser", ["hermes3", "", "mistral", "qwen3coder", "gptoss", "lfm2"])
@on_model_loop
async def test_a_named_function_is_called_with_arguments_that_fit(model: TextModel, tool_parser: str) -> None:
    """In the form of each model, whatever its weights would like."""
    model = with_settings(model, tool_parser=tool_parser)
    for seed in range(20):
        pieces = await _pieces(model, _asked(seed=seed, tools=_TOOLS, tool_choice="function", tool_name="measure"))
        (call,) = _calls(pieces)
        assert call[0] == "measure"
        assert _text(pieces) == ""
        if pieces[-1].finish is Finish.TOOL_CALLS:
            assert json.loads(call[1])["size"] in {1, 2}
            return
    pytest.fail("no call ended")


@on_model_loop
async def test_a_required_call_is_one_of_the_functions(model: TextModel) -> None:
    """Which one is the model's choice."""
    pieces = await _pieces(model, _asked(tools=_TOOLS, tool_choice="required"))
    assert _calls(pieces)[0][0] in {"measure", "rest"}


@on_model_loop
async def test_a_form_that_cannot_be_imposed_is_refused_before_the_engine_sees_it(model: TextModel) -> None:
    """With its place, and of a tool, too."""
    bad = {"type": "object", "properties": {"size": {"type": "int"}}}
    tool = {"type": "function", "function": {"name": "bad", "parameters": bad}}
    with pytest.raises(InvalidField, match=r"at \$.properties.size.type: expected one of string") as refused:
        await _pieces(model, _asked(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(bad))))
    assert refused.value.field == "response_format"
    with pytest.raises(InvalidField, match=r"tools\[0\].function.parameters: at \$.properties.size.type"):
        await _pieces(model, _asked(tools=(tool,), tool_choice="required"))
    assert _text(await _pieces(model, _asked(_said("fine")))) == "fine"


@on_model_loop
async def test_texts_are_whole_whose_special_tokens_are_shown(model: TextModel) -> None:
    """However long they are; parsers of formats that special tokens mark need it."""
    written = "abcdefghijklmnopqrstuvwxyz" * 4
    pieces = await _pieces(model, replace(_asked(_said(written)), skips_special_tokens=False))
    assert _text(pieces) == written


@pytest.fixture
def folder_with(tiny_folder: Path, tmp_path: Path) -> Any:
    """Give the model another template."""

    def make(template: str) -> Path:
        folder = tmp_path / "other"
        shutil.copytree(tiny_folder, folder)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


async def test_a_template_that_begins_reasoning_is_noticed(serve_tiny: ServeTiny, folder_with: Any) -> None:
    """So that the answer begins within it."""
    folder = folder_with(CHAT_TEMPLATE + "<think>\n{% if tools %}{% endif %}")
    async with serve_tiny(base_path=folder, path=folder, tool_parser="hermes3", reasoning_parser="qwen3") as model:
        pieces = await _pieces(model, _asked(_said("why\n</think>\nso"), tools=_TOOLS))
        assert "".join(piece.reasoning for piece in pieces) == "why"
        assert _text(pieces) == "so"


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
    """Serve a model whose template loops, refuses or compares for ever, by the messages."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(_LOOPS + _COMPARES_FOR_EVER + "hello")
    return host_of(base_path=folder, path=folder)


@on_model_loop
async def test_a_template_that_loops_or_refuses_is_the_requests_error(odd_model: TextModel) -> None:
    """With its line; the engine goes on."""
    asked = _asked(_said("fine"))
    for messages, said in (
        (({"role": "user", "content": "loop"},), "line 1: it loops for too long"),
        (_HELLO * 2, "line 2: one is enough"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            await _pieces(odd_model, GenerationRequest(Conversation(messages), asked.sampling))
    assert _text(await _pieces(odd_model, asked)) == "fine"


@on_model_loop
async def test_other_requests_go_on_while_a_template_runs_for_too_long(odd_model: TextModel) -> None:
    """The comparison of two lists that share their parts has no end; its process is stopped, and not the engine."""
    hostile = GenerationRequest(Conversation(({"role": "user", "content": "hostile"},)), _asked(_said("fine")).sampling)
    ends: list[str] = []

    async def fail() -> None:
        with pytest.raises(InvalidRequest, match=r"chat_template\.jinja used more than 2 s of CPU time"):
            await _pieces(odd_model, hostile)
        ends.append("hostile")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        await trio.testing.wait_all_tasks_blocked()
        assert await _pieces(odd_model, GenerationRequest("fine", Sampling(max_tokens=20)))
        ends.append("text")
    assert ends == ["text", "hostile"]
    assert _text(await _pieces(odd_model, _asked(_said("fine")))) == "fine"
