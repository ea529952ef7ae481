from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import DeadlineExceeded, GraphFailure, InvalidRequest, NotSupported
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Sampling,
    Task,
)
from tests.support.graphs import LOOPBACK, graph_text, handler, loaded, python_node

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ovmstrio.graphs.servable import GraphServable


WORDS = handler("""
    for word in bytes(inputs[0]).split():
        yield [Tensor("text", word + b" ")]
    yield [Tensor("end", b"")]
    yield [Tensor("text", b"behind the end")]
""")

ENDLESS = """
import pathlib
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.log = pathlib.Path(kwargs["base_path"]) / "closed"
    def execute(self, inputs):
        try:
            while True:
                yield [Tensor("text", b"x")]
        finally:
            self.log.write_text("closed")
"""

TWO_OUTPUTS = ("TEXT:text", "END:end")


def _graph(comment: str = "", outputs: tuple[str, ...] = TWO_OUTPUTS, *, more: str = LOOPBACK) -> str:
    node = python_node("handler.py", ["IN:prompt"], outputs, more=more)
    shown = [f"OVMS_PY_TENSOR_{each}" for each in outputs]
    return graph_text(comment, node, inputs=["OVMS_PY_TENSOR:prompt"], outputs=shown)


def _request(text: str, **more: object) -> GenerationRequest:
    conversation = Conversation(({"role": "user", "content": text},))
    return GenerationRequest(conversation, **more)  # type: ignore[arg-type]  # as each test has it


async def _pieces(graph: GraphServable, request: GenerationRequest) -> list[GenerationChunk]:
    async with graph.generate(request) as generation:
        return [piece async for piece in generation]


def _joined(pieces: list[GenerationChunk]) -> tuple[str, int, Finish | None]:
    assert all(piece.finish is None for piece in pieces[:-1])
    return "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces), pieces[-1].finish


def _serving(folder: Path, source: str = WORDS, text: str = "") -> AbstractAsyncContextManager[GraphServable]:
    return loaded(folder / "graph", text or _graph(), handler=source)


# What comes


async def test_packets_of_text_are_pieces_up_to_the_end(tmp_path: Path) -> None:
    async with _serving(tmp_path) as graph:
        assert graph.tasks == {Task.TEXT_GENERATION}
        pieces = await _pieces(graph, _request("one two three"))
    assert [piece.text for piece in pieces] == ["one ", "two ", "three ", ""]
    assert _joined(pieces) == ("one two three ", 3, Finish.STOP)


async def test_end_of_the_generator_is_a_stop_without_an_end_output(tmp_path: Path) -> None:
    async with _serving(tmp_path, text=_graph("# OVMSTRIO_CHAT: text=text")) as graph:
        answer = _joined(await _pieces(graph, _request("one two")))
    assert answer == ("one two behind the end", 3, Finish.STOP)


async def test_regular_graph_answers_chats_with_a_comment(tmp_path: Path) -> None:
    source = handler("return [Tensor('text', bytes(inputs[0]).upper())]")
    text = _graph("# OVMSTRIO_CHAT:", ("TEXT:text",), more="")
    async with _serving(tmp_path, source, text) as graph:
        assert _joined(await _pieces(graph, _request("one two"))) == ("ONE TWO", 1, Finish.STOP)
    async with _serving(tmp_path, source, _graph("", ("TEXT:text",), more="")) as graph:
        assert graph.tasks == set()
        with pytest.raises(NotSupported, match=r"has no chat streams: expected .*OVMSTRIO_CHAT: prompt=INPUT"):
            await _pieces(graph, _request("one"))


async def test_characters_are_joined_across_packets(tmp_path: Path) -> None:
    parts = b"\xe2", b"\x82", b"\xac ", b"\xff ", b"\xe2\x82"
    source = handler(f"for part in {parts}:\n    yield [Tensor('text', part)]")
    async with _serving(tmp_path, source) as graph:
        pieces = await _pieces(graph, _request("x"))
    assert [piece.text for piece in pieces] == ["", "", "\N{EURO SIGN} ", "\ufffd ", "", "\ufffd"]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ('Tensor("text", b"plain")', "plain"),
        ('Tensor("text", b"plain", datatype="BYTES")', "plain"),
        ('Tensor("text", b"\\x02\\0\\0\\0ab\\x01\\0\\0\\0c", [2], "BYTES")', "abc"),
        ('Tensor("text", b"own", datatype="my_text")', "own"),
        ('Tensor("text", b"")', ""),
    ],
)
async def test_text_is_read_from_every_form_of_tensor(tmp_path: Path, made: str, expected: str) -> None:
    async with _serving(tmp_path, handler(f"yield [{made}]")) as graph:
        assert _joined(await _pieces(graph, _request("x"))) == (expected, 1, Finish.STOP)


async def test_numbers_are_refused(tmp_path: Path) -> None:
    source = handler("yield [Tensor('text', np.zeros(3, np.float32))]", head="import numpy as np")
    async with _serving(tmp_path, source) as graph:
        with pytest.raises(GraphFailure, match=r'output "text" .* expected UTF-8 bytes, .*text.encode\(\)\), got FP32'):
            await _pieces(graph, _request("x"))


# What goes in

ECHO = handler(
    """
    tensors = {each.name: bytes(each).decode() for each in inputs}
    yield [Tensor("text", json.dumps([tensors, dict(current_context().parameters)]).encode())]
    """,
    head="import json\nfrom pyovms import current_context",
)

TURNS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n"},
    {"role": "assistant", "content": "well"},
)


async def test_prompt_is_the_last_user_message_and_messages_are_json(tmp_path: Path) -> None:
    node = python_node("handler.py", ["A:a", "B:b"], ["TEXT:text"], more=LOOPBACK)
    inputs, outputs = ["OVMS_PY_TENSOR_A:a", "OVMS_PY_TENSOR_B:b"], ["OVMS_PY_TENSOR:text"]
    text = graph_text("# OVMSTRIO_CHAT: prompt=a messages=b", node, inputs=inputs, outputs=outputs)
    async with _serving(tmp_path, ECHO, text) as graph:
        chat, _ = json.loads(_joined(await _pieces(graph, GenerationRequest(Conversation(TURNS))))[0])
        plain, _ = json.loads(_joined(await _pieces(graph, GenerationRequest("as it is")))[0])
    assert (chat["a"], json.loads(chat["b"])) == (TURNS[3]["content"], list(TURNS))
    assert (plain["a"], json.loads(plain["b"])) == ("as it is", [{"role": "user", "content": "as it is"}])


async def test_sampling_fields_become_parameters(tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=7, temperature=0.25, top_k=3, seed=0, ignore_eos=True)
    tools = ({"type": "function"},)
    conversation = Conversation(TURNS, template_options={"enable_thinking": False}, tools=tools, tool_choice="none")
    async with _serving(tmp_path, ECHO) as graph:
        request = GenerationRequest(conversation, sampling, stop=("never",))
        _, parameters = json.loads(_joined(await _pieces(graph, request))[0])
        _, none = json.loads(_joined(await _pieces(graph, _request("x")))[0])
    assert parameters == {
        "max_tokens": 7,
        "max_new_tokens": 7,
        "temperature": 0.25,
        "top_k": 3,
        "seed": 0,
        "ignore_eos": True,
        "chat_template_kwargs": '{"enable_thinking": false}',
    }
    assert none == {}


@pytest.mark.parametrize(
    ("unsupported", "words"),
    [
        (_request("x", n=2), r'n: graph "graph" runs user code .*expected 1; got 2'),
        (_request("x", logprobs=True), "logprobs: .* returns no probabilities"),
        (_request("x", echo=True), "echo: "),
        (_request("x", sampling=Sampling(best_of=3)), "best_of: "),
        (_request("x", sampling=Sampling(stop_token_ids=(1,))), "stop_token_ids: .*use stop"),
        (_request("x", grammar=Grammar(GrammarKind.JSON_OBJECT, "{}")), "response_format: "),
        (GenerationRequest(Conversation(TURNS, tools=({"type": "function"},))), "tools: .*tool_choice"),
        (
            GenerationRequest(Conversation(TURNS, continues_final_message=True)),
            "continue_final_message: ",
        ),
        (GenerationRequest((1, 2, 3)), "prompt: .*expected a text; got token ids"),
        (GenerationRequest(Conversation(TURNS[:1])), r'expected one with the role "user"; got system'),
        (_request("x", n=2, logprobs=True), "n: .* Also: logprobs: "),
    ],
)
async def test_unsupported_fields_are_refused(tmp_path: Path, unsupported: GenerationRequest, words: str) -> None:
    async with _serving(tmp_path, "raise_if_called = True\n" + ECHO) as graph:
        with pytest.raises(InvalidRequest, match=words):
            async with graph.generate(unsupported):
                raise AssertionError("it has begun")


# How it ends


async def test_token_limit_closes_the_generator(tmp_path: Path) -> None:
    async with _serving(tmp_path, ENDLESS) as graph:
        answer = _joined(await _pieces(graph, _request("x", sampling=Sampling(max_tokens=5))))
        assert (tmp_path / "graph" / "closed").read_text() == "closed"
    assert answer == ("xxxxx", 5, Finish.LENGTH)


@pytest.mark.parametrize(("keeps", "expected"), [(False, "one t"), (True, "one two")])
async def test_stop_string_is_found_across_packets(tmp_path: Path, *, keeps: bool, expected: str) -> None:
    source = handler(
        "for part in (b'one t', b'w', b'o', b' three'):\n    yield [Tensor('text', part)]\nraise ValueError"
    )
    async with _serving(tmp_path, source) as graph:
        pieces = await _pieces(graph, _request("x", stop=("wo", "never"), includes_stop=keeps))
        held = await _pieces(graph, _request("x", stop=("t ",), sampling=Sampling(max_tokens=1)))
    assert [piece.text for piece in pieces] == ["one t", "", "wo" if keeps else ""]
    assert _joined(pieces) == (expected, 3, Finish.STOP)
    assert _joined(held) == ("one t", 1, Finish.LENGTH)


async def test_usage_is_read_from_an_output(tmp_path: Path) -> None:
    source = handler("""
    yield [Tensor("text", b"a long text")]
    yield [Tensor("end", b""), Tensor("usage", b'{"prompt_tokens": 7, "completion_tokens": 4}')]
    """)
    outputs = (*TWO_OUTPUTS, "USAGE:usage")
    async with _serving(tmp_path, source, _graph("# OVMSTRIO_CHAT: end=end usage=usage", outputs)) as graph:
        async with graph.generate(_request("x")) as generation:
            answer = _joined([piece async for piece in generation])
            assert generation.prompt_tokens == 7
        full = _joined(await _pieces(graph, _request("x", sampling=Sampling(max_tokens=4))))
    assert answer == ("a long text", 4, Finish.STOP)
    assert full == ("a long text", 4, Finish.LENGTH)


@pytest.mark.parametrize("usage", ["seven", "[1]", '{"completion_tokens": -1}', '{"prompt_tokens": 1.5}'])
async def test_invalid_usage_is_an_error(tmp_path: Path, usage: str) -> None:
    source = handler(f"yield [Tensor('end', {usage.encode()!r})]")
    async with _serving(tmp_path, source, _graph("# OVMSTRIO_CHAT: usage=end")) as graph:
        with pytest.raises(GraphFailure, match=r'output "end" .* expected JSON such as .*"completion_tokens": 12'):
            await _pieces(graph, _request("x"))


async def test_error_of_the_generator_follows_its_text(tmp_path: Path) -> None:
    source = handler("yield [Tensor('text', b'so far')]\nraise ValueError('no further')")
    async with _serving(tmp_path, source) as graph:
        # A caller that has handled the error gets it once only.
        async with graph.generate(_request("x")) as generation:
            assert (await anext(aiter(generation))).text == "so far"
            with pytest.raises(GraphFailure, match=r"ValueError: no further .*handler.py:6"):
                await anext(aiter(generation))
        with pytest.raises(GraphFailure, match="no further"):
            await _pieces(graph, _request("x"))


async def test_deadline_ends_a_started_and_a_starting_text(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    body = "yield [Tensor('text', b'in time')]\nawait trio.sleep_forever()"
    source = handler(body, prefix="async ", head="import trio")
    request = _request("x", deadline=trio.current_time() + 3)
    async with _serving(tmp_path, source) as graph, graph.generate(request) as generation:
        assert (await anext(aiter(generation))).text == "in time"
        with pytest.raises(DeadlineExceeded, match="deadline exceeded while the graph generated text"):
            await anext(aiter(generation))
    slow = source + "    async def open(self, context):\n        await trio.sleep_forever()\n"
    async with _serving(tmp_path, slow) as graph:
        with pytest.raises(DeadlineExceeded):
            async with graph.generate(_request("x", deadline=trio.current_time() + 3)):
                raise AssertionError("the generation has begun")
    assert autojump_clock.autojump_threshold == 0
