"""Graphs that answer chats: what user code is given, what becomes of its packets, and each way in which a text ends."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from ovmstrio.core.errors import DeadlineExceeded, GraphFailure, InvalidRequest, NotSupported
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Piece,
    Sampling,
    Task,
)
from tests.support.graphs import LOOPBACK, graph_text, loaded, python_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from ovmstrio.runtimes.graphs.graph_servable import GraphServable

TALE = """
from pyovms import current_context
class OvmsPythonModel:
    def execute(self, inputs):
        for word in bytes(inputs[0]).decode().split():
            yield [Tensor("text", word.encode() + b" ")]
        yield [Tensor("end", b"")]
        yield [Tensor("text", b"behind the end")]
"""

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


def _said(text: str, **more: object) -> GenerationRequest:
    conversation = Conversation(({"role": "user", "content": text},))
    return GenerationRequest(conversation, **more)  # type: ignore[arg-type]  # as each test has it


async def _pieces(graph: GraphServable, asked: GenerationRequest) -> list[Piece]:
    async with graph.generate(asked) as generation:
        return [piece async for piece in generation]


def _told(pieces: list[Piece]) -> tuple[str, int, Finish | None]:
    assert all(piece.finish is None for piece in pieces[:-1])
    return "".join(piece.text for piece in pieces), sum(piece.tokens for piece in pieces), pieces[-1].finish


@asynccontextmanager
async def _talking(folder: Path, source: str = TALE, text: str = "") -> AsyncIterator[GraphServable]:
    async with loaded(folder / "graph", text or _graph(), handler=source) as graph:
        yield graph


# What comes


async def test_each_packet_of_text_is_a_piece_and_the_end_is_a_stop(tmp_path: Path) -> None:
    """What the generator says behind its end is not told; packets are counted as tokens."""
    async with _talking(tmp_path) as graph:
        assert graph.tasks == {Task.TEXT_GENERATION}
        pieces = await _pieces(graph, _said("one two three"))
    assert [piece.text for piece in pieces] == ["one ", "two ", "three ", ""]
    assert _told(pieces) == ("one two three ", 3, Finish.STOP)


async def test_the_end_of_the_generator_is_a_stop_where_no_output_is_the_end(tmp_path: Path) -> None:
    """Every packet of text is told."""
    async with _talking(tmp_path, text=_graph("# OVMSTRIO_CHAT: text=text")) as graph:
        told = _told(await _pieces(graph, _said("one two")))
    assert told == ("one two behind the end", 3, Finish.STOP)


async def test_a_graph_that_answers_once_makes_a_text_of_one_piece(tmp_path: Path) -> None:
    """It needs the comment, for it may be anything."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("text", bytes(inputs[0]).upper())]
    """
    text = _graph("# OVMSTRIO_CHAT:", ("TEXT:text",), more="")
    async with _talking(tmp_path, source, text) as graph:
        assert _told(await _pieces(graph, _said("one two"))) == ("ONE TWO", 1, Finish.STOP)
    async with _talking(tmp_path, source, _graph("", ("TEXT:text",), more="")) as graph:
        assert graph.tasks == set()
        with pytest.raises(NotSupported, match=r"answers no chats: expected .*OVMSTRIO_CHAT: prompt=INPUT"):
            await _pieces(graph, _said("one"))


async def test_letters_that_are_cut_between_packets_are_told_when_they_are_whole(tmp_path: Path) -> None:
    """What is no UTF-8 becomes the replacement character, be it the last."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            for part in (b"\\xe2", b"\\x82", b"\\xac ", b"\\xff ", b"\\xe2\\x82"):
                yield [Tensor("text", part)]
    """
    async with _talking(tmp_path, source) as graph:
        pieces = await _pieces(graph, _said("x"))
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
async def test_texts_of_every_form_are_read(tmp_path: Path, made: str, expected: str) -> None:
    """Elements of BYTES may be behind their lengths, as clients of tensors have them, or not."""
    source = f"class OvmsPythonModel:\n    def execute(self, inputs):\n        yield [{made}]\n"
    async with _talking(tmp_path, source) as graph:
        assert _told(await _pieces(graph, _said("x"))) == (expected, 1, Finish.STOP)


async def test_numbers_are_no_text(tmp_path: Path) -> None:
    """The error says how a text is given."""
    source = """
    import numpy as np
    class OvmsPythonModel:
        def execute(self, inputs):
            yield [Tensor("text", np.zeros(3, np.float32))]
    """
    async with _talking(tmp_path, source) as graph:
        with pytest.raises(GraphFailure, match=r'output "text" .* is no text: .*text.encode\(\)\), got FP32'):
            await _pieces(graph, _said("x"))


# What goes in

ECHO = """
import json
from pyovms import current_context
class OvmsPythonModel:
    def execute(self, inputs):
        given = {each.name: bytes(each).decode() for each in inputs}
        yield [Tensor("text", json.dumps([given, dict(current_context().parameters)]).encode())]
"""

TURNS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n"},
    {"role": "assistant", "content": "well"},
)


async def test_the_prompt_is_the_last_message_of_the_user_and_messages_are_json(tmp_path: Path) -> None:
    """A graph may take both, and a prompt of completions becomes a message."""
    node = python_node("handler.py", ["A:a", "B:b"], ["TEXT:text"], more=LOOPBACK)
    text = graph_text(
        "# OVMSTRIO_CHAT: prompt=a messages=b",
        node,
        inputs=["OVMS_PY_TENSOR_A:a", "OVMS_PY_TENSOR_B:b"],
        outputs=["OVMS_PY_TENSOR:text"],
    )
    async with _talking(tmp_path, ECHO, text) as graph:
        chat, _ = json.loads(_told(await _pieces(graph, GenerationRequest(Conversation(TURNS))))[0])
        plain, _ = json.loads(_told(await _pieces(graph, GenerationRequest("as it is")))[0])
    assert (chat["a"], json.loads(chat["b"])) == (TURNS[3]["content"], list(TURNS))
    assert (plain["a"], json.loads(plain["b"])) == ("as it is", [{"role": "user", "content": "as it is"}])


async def test_what_is_asked_of_sampling_becomes_parameters_of_those_names(tmp_path: Path) -> None:
    """Numbers with a fraction, too; what was not asked for is not there, so that the code's own defaults count."""
    sampling = Sampling(max_tokens=7, temperature=0.25, top_k=3, seed=0, ignore_eos=True)
    conversation = Conversation(TURNS, template_options={"enable_thinking": False})
    async with _talking(tmp_path, ECHO) as graph:
        asked = GenerationRequest(conversation, sampling, stop=("never",))
        _, parameters = json.loads(_told(await _pieces(graph, asked))[0])
        _, none = json.loads(_told(await _pieces(graph, _said("x")))[0])
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
    ("asked", "words"),
    [
        (_said("x", n=2), r'n: "graph" is a graph of user code, .*expected 1; got 2'),
        (_said("x", logprobs=True), "logprobs: .* tells no probabilities"),
        (_said("x", echo=True), "echo: "),
        (_said("x", sampling=Sampling(best_of=3)), "best_of: "),
        (_said("x", sampling=Sampling(stop_token_ids=(1,))), "stop_token_ids: .*use stop"),
        (_said("x", grammar=Grammar(GrammarKind.JSON_OBJECT, "{}")), "response_format: "),
        (GenerationRequest(Conversation(TURNS, tools=({"type": "function"},))), "tools: .*tool_choice"),
        (GenerationRequest((1, 2, 3)), "prompt: .*takes a text; got numbers of tokens"),
        (GenerationRequest(Conversation(TURNS[:1])), r'expected one with the role "user"; got system'),
        (_said("x", n=2, logprobs=True), "n: .* Also: logprobs: "),
    ],
)
async def test_what_no_graph_can_do_is_refused_with_the_reason(
    tmp_path: Path, asked: GenerationRequest, words: str
) -> None:
    """The generator is not begun."""
    async with _talking(tmp_path, "raise_if_called = True\n" + ECHO) as graph:
        with pytest.raises(InvalidRequest, match=words):
            async with graph.generate(asked):
                raise AssertionError("it has begun")


async def test_tools_that_are_not_to_be_called_are_no_reason_to_refuse(tmp_path: Path) -> None:
    """Clients send them with every request."""
    conversation = Conversation(TURNS, tools=({"type": "function"},), tool_choice="none")
    async with _talking(tmp_path) as graph:
        assert _told(await _pieces(graph, GenerationRequest(conversation)))[2] is Finish.STOP


# How it ends


async def test_enough_tokens_are_a_length_and_close_the_generator(tmp_path: Path) -> None:
    """It would never end."""
    async with _talking(tmp_path, ENDLESS) as graph:
        told = _told(await _pieces(graph, _said("x", sampling=Sampling(max_tokens=5))))
        assert (tmp_path / "graph" / "closed").read_text() == "closed"
    assert told == ("xxxxx", 5, Finish.LENGTH)


@pytest.mark.parametrize(("keeps", "expected"), [(False, "one t"), (True, "one two")])
async def test_a_stop_string_across_packets_ends_the_text(tmp_path: Path, *, keeps: bool, expected: str) -> None:
    """What may begin one is held back until that is known."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            for part in ("one t", "w", "o", " three"):
                yield [Tensor("text", part.encode())]
            raise ValueError("read on")
    """
    async with _talking(tmp_path, source) as graph:
        pieces = await _pieces(graph, _said("x", stop=("wo", "never"), keeps_stop=keeps))
        held = await _pieces(graph, _said("x", stop=("t ",), sampling=Sampling(max_tokens=1)))
    assert [piece.text for piece in pieces] == ["one t", "", "wo" if keeps else ""]
    assert _told(pieces) == (expected, 3, Finish.STOP)
    assert _told(held) == ("one t", 1, Finish.LENGTH)


async def test_an_output_tells_what_was_used(tmp_path: Path) -> None:
    """It may come behind the end; as many tokens as were allowed are a length."""
    source = """
    import json
    class OvmsPythonModel:
        def execute(self, inputs):
            yield [Tensor("text", b"a long text")]
            yield [Tensor("end", b""), Tensor("usage", b'{"prompt_tokens": 7, "completion_tokens": 4}')]
    """
    outputs = (*TWO_OUTPUTS, "USAGE:usage")
    async with _talking(tmp_path, source, _graph("# OVMSTRIO_CHAT: end=end usage=usage", outputs)) as graph:
        async with graph.generate(_said("x")) as generation:
            told = _told([piece async for piece in generation])
            assert generation.prompt_tokens == 7
        full = _told(await _pieces(graph, _said("x", sampling=Sampling(max_tokens=4))))
    assert told == ("a long text", 4, Finish.STOP)
    assert full == ("a long text", 4, Finish.LENGTH)


@pytest.mark.parametrize("said", ["seven", "[1]", '{"completion_tokens": -1}', '{"prompt_tokens": 1.5}'])
async def test_usage_that_tells_nothing_is_an_error_of_the_graph(tmp_path: Path, said: str) -> None:
    """The error says what is expected."""
    source = f"""
    class OvmsPythonModel:
        def execute(self, inputs):
            yield [Tensor("end", {said!r}.encode())]
    """
    async with _talking(tmp_path, source, _graph("# OVMSTRIO_CHAT: usage=end")) as graph:
        with pytest.raises(GraphFailure, match=r'output "end" .* expected JSON as .*"completion_tokens": 12'):
            await _pieces(graph, _said("x"))


async def test_what_user_code_raises_midway_comes_behind_what_it_said(tmp_path: Path) -> None:
    """With file and line; and a reader who has handled it is not told again."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            yield [Tensor("text", b"so far")]
            raise ValueError("no further")
    """
    texts, told = list[str](), list[str]()
    async with _talking(tmp_path, source) as graph:
        async with graph.generate(_said("x")) as generation:
            try:
                texts.append((await anext(aiter(generation))).text)
                await anext(aiter(generation))
            except GraphFailure as error:
                told.append(error.message)
        with pytest.raises(GraphFailure, match="no further"):
            await _pieces(graph, _said("x"))
    assert texts == ["so far"]
    (message,) = told
    assert "ValueError: no further" in message
    assert "handler.py:6" in message


async def test_user_code_that_raises_at_once_fails_the_text(tmp_path: Path) -> None:
    """No piece comes before."""
    source = """
    class OvmsPythonModel:
        def execute(self, inputs):
            raise ValueError("not today")
    """
    async with _talking(tmp_path, source) as graph:
        with pytest.raises(GraphFailure, match=r"ValueError: not today .*handler.py:5"):
            await _pieces(graph, _said("x"))


async def test_a_reader_who_does_not_read_holds_up_his_own_generator_and_nobody_elses(tmp_path: Path) -> None:
    """What the generator has said meanwhile has a bound."""
    source = """
    class OvmsPythonModel:
        def initialize(self, kwargs):
            self.steps = 0
        def execute(self, inputs):
            if bytes(inputs[0]) == b"count":
                yield [Tensor("text", b"%d" % self.steps)]
            else:
                while True:
                    self.steps += 1
                    yield [Tensor("text", b"x")]
    """
    async with _talking(tmp_path, source) as graph, graph.generate(_said("on and on")) as generation:
        assert (await anext(aiter(generation))).text == "x"
        with trio.fail_after(60):
            counts = {"": -1}
            while counts.get("now") != counts.get("before", -1):
                counts["before"] = counts.get("now", -1)
                counts["now"] = int(_told(await _pieces(graph, _said("count")))[0])
    assert 1 <= counts["now"] < 200


async def test_a_deadline_ends_a_text_midway_and_one_that_has_not_begun(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """What was said before is told."""
    source = """
    import trio
    class OvmsPythonModel:
        async def execute(self, inputs):
            yield [Tensor("text", b"in time")]
            await trio.sleep_forever()
    """
    texts = list[str]()
    async with _talking(tmp_path, source) as graph:
        async with graph.generate(_said("x", deadline=trio.current_time() + 3)) as generation:
            texts.append((await anext(aiter(generation))).text)
            with pytest.raises(DeadlineExceeded, match="before the graph had made the whole text"):
                await anext(aiter(generation))
        slow = source.replace(
            "async def execute",
            "async def open(self, context):\n            await trio.sleep_forever()\n        async def execute",
        )
    async with _talking(tmp_path, slow) as graph:
        with pytest.raises(DeadlineExceeded):
            async with graph.generate(_said("x", deadline=trio.current_time() + 3)):
                texts.append("begun")
    assert texts == ["in time"]
    assert autojump_clock.autojump_threshold == 0
