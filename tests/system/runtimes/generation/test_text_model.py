"""A model in a process of its own makes the same text as the library alone, for many at once, until they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import trio

from ovmstrio.core.errors import ContextExceeded, DeadlineExceeded, InvalidField, InvalidRequest, Overloaded
from ovmstrio.core.generation import Conversation, Finish, GenerationRequest, Piece, Prompt, Sampling
from ovmstrio.runtimes.generation.text_model import TextModel
from tests.support.model_hosts import on_model_loop
from tests.support.tiny_llm import CONTEXT, VOCABULARY
from tests.system.runtimes.generation.conftest import ServeTiny

_BARE: Final = """
import json, sys, openvino_genai as genai
scheduler = genai.SchedulerConfig()
scheduler.num_kv_blocks = 256
pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU")
config = pipeline.get_config()
config.max_new_tokens, config.ignore_eos = int(sys.argv[2]), True
config.apply_chat_template = False
told = [pipeline.generate([prompt], [config])[0].m_generation_ids[0] for prompt in json.loads(sys.argv[3])]
print(json.dumps(told))
"""

PROMPTS: Final = [f"number {number} of the men" for number in range(8)]


def greedy(prompt: Prompt, tokens: int) -> GenerationRequest:
    """Ask for the likeliest text of so many tokens."""
    return GenerationRequest(prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))


async def made(model: TextModel, asked: GenerationRequest) -> list[Piece]:
    """Take an answer to its end."""
    async with model.generate(asked) as generation:
        return [piece async for piece in generation]


def text_of(pieces: list[Piece], index: int = 0) -> str:
    """Join the text of pieces."""
    return "".join(piece.text for piece in pieces if piece.index == index)


def bare_texts(folder: Path, prompts: list[str], tokens: int) -> list[str]:
    """Have the library make texts, in a process without a server."""
    command = [sys.executable, "-c", _BARE, str(folder), str(tokens), json.dumps(prompts)]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    told: list[str] = json.loads(done.stdout.splitlines()[-1])
    return told


@on_model_loop
async def test_eight_greedy_texts_at_once_are_those_of_the_bare_library(model: TextModel, tiny_folder: Path) -> None:
    """Texts that are made together are those that are made alone."""
    texts: dict[str, str] = {}

    async def ask(model: TextModel, prompt: str) -> None:
        texts[prompt] = text_of(await made(model, greedy(prompt, 80)))

    async with trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            nursery.start_soon(ask, model, prompt)
    expected = await trio.to_thread.run_sync(bare_texts, tiny_folder, PROMPTS, 80)
    assert [texts[prompt] for prompt in PROMPTS] == expected
    assert len(set(expected)) > 3


@on_model_loop
async def test_whoever_leaves_is_out_of_the_batch_and_the_others_go_on_alike(model: TextModel) -> None:
    """A request that is left midway changes nobody's text, and its room is free for the next ones."""
    alone = text_of(await made(model, greedy("of the barn", 300)))
    texts: list[str] = []

    async def stay() -> None:
        texts.append(text_of(await made(model, greedy("of the barn", 300))))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay)
        for _ in range(20):
            async with model.generate(greedy("the inn", 1500)) as generation:
                async for _ in generation:
                    break
    assert texts == [alone]
    assert not model.open_requests


@on_model_loop
async def test_messages_become_the_prompt_of_the_models_template(model: TextModel) -> None:
    """A conversation gives the text of its rendered template."""
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    chat = await made(model, greedy(Conversation(({"role": "user", "content": "hi"},)), 40))
    tokens = tuple(map(int, (await model.tokenize([prompt], add_special_tokens=False))[0]))
    assert text_of(chat) == text_of(await made(model, greedy(tokens, 40)))


@on_model_loop
async def test_many_texts_have_the_tokens_of_each_alone(model: TextModel) -> None:
    """Short and long ones, empty ones, and what the library cannot read."""
    texts = ["the cat", "", "a", "\u4e2d\u6587 x", "b \ud800", "the " * 1000, " "] * 40
    together = await model.tokenize(texts)
    alone = [(await model.tokenize([text]))[0] for text in texts[:7]] * 40
    assert [list(row) for row in together] == [list(row) for row in alone]


@on_model_loop
async def test_pieces_count_the_tokens_and_the_last_one_says_why_the_text_ended(model: TextModel) -> None:
    """Usage is the sum of the pieces."""
    async with model.generate(greedy("hello", 25)) as generation:
        pieces = [piece async for piece in generation]
    assert generation.prompt_tokens == 5
    assert sum(piece.tokens for piece in pieces) == 25
    assert [piece.finish for piece in pieces if piece.finish] == [Finish.LENGTH]


@on_model_loop
async def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_the_numbers(model: TextModel) -> None:
    """The context bounds prompt and answer together, and tells both numbers."""
    assert model.limits.context_length == CONTEXT
    assert model.limits.vocabulary_size == len(VOCABULARY)
    with pytest.raises(ContextExceeded, match=f"maximum context length is {CONTEXT} tokens") as caught:
        await made(model, greedy((5,) * CONTEXT, 1))
    assert f"the prompt has {CONTEXT}, and at most {CONTEXT - 1} fit" in str(caught.value)
    pieces = await made(model, greedy((5,) * (CONTEXT - 3), 100))
    assert sum(piece.tokens for piece in pieces) == 3
    with pytest.raises(ContextExceeded, match=f"length is {CONTEXT} tokens, and prompt has at least 40000000"):
        await made(model, greedy("the " * 10_000_000, 1))


@pytest.mark.parametrize("tokens", [(-1, 4), (3, 100_000), ()])
@on_model_loop
async def test_tokens_that_are_none_are_refused(model: TextModel, tokens: tuple[int, ...]) -> None:
    """The library would take them, and make garbage."""
    with pytest.raises(InvalidRequest, match="token"):
        await made(model, greedy(tokens, 1))


async def test_more_than_the_settings_allow_is_refused_by_its_field(serve_tiny: ServeTiny) -> None:
    """Limits of the configuration are told with the field that is beyond them."""
    async with serve_tiny(max_tokens_limit=10, best_of_limit=2) as model:
        with pytest.raises(InvalidField, match="max_tokens is at most 10") as caught:
            await made(model, greedy("hello", 11))
        assert caught.value.field == "max_tokens"
        with pytest.raises(InvalidField, match="n is at most 2"):
            await made(model, GenerationRequest("hello", n=3))
        pieces = await made(model, GenerationRequest("hello", Sampling(ignore_eos=True)))
        assert sum(piece.tokens for piece in pieces) == 10


@on_model_loop
async def test_a_deadline_ends_a_text_midway(model: TextModel) -> None:
    """Beyond its deadline nothing is waited for, and the engine forgets the request."""
    asked = GenerationRequest("hello", Sampling(ignore_eos=True), deadline=trio.current_time() + 0.3)
    with pytest.raises(DeadlineExceeded):
        await made(model, asked)
    assert not model.open_requests


@on_model_loop
async def test_texts_of_one_request_have_seeds_of_their_own_and_the_same_ones_each_time(model: TextModel) -> None:
    """Three texts differ, and come again with the same seed."""
    asked = GenerationRequest("hello", Sampling(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True), n=3)
    first, second = await made(model, asked), await made(model, asked)
    texts = [text_of(first, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert texts == [text_of(second, index) for index in range(3)]
    assert sorted(piece.index for piece in first if piece.finish) == [0, 1, 2]


@on_model_loop
async def test_a_stop_string_ends_a_text_before_it_or_behind_it(model: TextModel) -> None:
    """It is not in the text unless it is to be kept, however its letters fall into tokens."""
    whole = text_of(await made(model, greedy("hello", 200)))
    stop = whole[20:25]
    place = whole.index(stop)
    for keeps, expected in ((False, whole[:place]), (True, whole[:place] + stop)):
        asked = replace(greedy("hello", 200), stop=("never", stop), keeps_stop=keeps)
        pieces = await made(model, asked)
        assert text_of(pieces) == expected
        assert pieces[-1].finish is Finish.STOP


@on_model_loop
async def test_an_echoed_prompt_comes_with_its_own_log_probabilities_each_time(model: TextModel) -> None:
    """A prefix that is cached has none in the library; the first token has none at all."""
    prompt = "the men in the barn " * 10
    asked = replace(greedy(prompt, 0), echo=True, logprobs=True)
    await made(model, greedy(prompt, 5))
    first, second = await made(model, asked), await made(model, asked)
    both = await made(model, replace(greedy(prompt, 3), echo=True, logprobs=True))
    length = len((await model.tokenize([prompt]))[0])
    values = [each.logprob for piece in first for each in piece.logprobs]
    assert values[0] is None
    assert len(values) == length
    assert all(value is not None and value < 0 for value in values[1:])
    assert [each.logprob for piece in second for each in piece.logprobs] == values
    told = [each for piece in both for each in piece.logprobs]
    assert [each.logprob for each in told[:length]] == values
    assert len(told) == length + 3
    assert text_of(first) == prompt
    assert text_of(both).startswith(prompt)
    assert first[-1].finish is Finish.LENGTH


async def test_requests_beyond_the_queue_are_refused_and_the_others_come_to_their_end(serve_tiny: ServeTiny) -> None:
    """What has no room waits, what would wait too long is told when to come again, and who leaves makes room."""
    ended: list[int] = []

    async def ask(model: TextModel, prompt: str) -> None:
        ended.append(sum(piece.tokens for piece in await made(model, greedy(prompt, 300))))

    async with serve_tiny(max_num_seqs=2, max_queue=2) as model:
        async with model.generate(greedy("first", 1500)) as first, trio.open_nursery() as nursery:
            await anext(aiter(first))
            for number in range(3):
                nursery.start_soon(ask, model, f"number {number}")
            while model.open_requests < 4:
                await trio.lowlevel.checkpoint()
            with pytest.raises(Overloaded, match="2 requests wait") as caught:
                await made(model, greedy("one too many", 1))
            assert caught.value.retry_after_seconds >= 1
        assert ended == [300, 300, 300]


async def test_forty_requests_for_a_cache_of_a_few_all_come_to_their_end(serve_tiny: ServeTiny) -> None:
    """Admission promises no more blocks than there are, so that nothing is ignored for want of memory."""
    ended: list[int] = []

    async def ask(model: TextModel, number: int) -> None:
        ended.append(sum(piece.tokens for piece in await made(model, greedy(f"number {number} " * 20, 150))))

    async with serve_tiny(cache_size=0.001) as model, trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(ask, model, number)
    assert ended == [150] * 40


@on_model_loop
async def test_a_reader_that_takes_nothing_holds_nobody_up_and_gets_its_whole_text_later(model: TextModel) -> None:
    """Pieces are joined while nobody takes them."""
    expected = text_of(await made(model, greedy("slow", 300)))
    async with model.generate(greedy("slow", 300)) as slow:
        await made(model, greedy("fast", 600))
        pieces = [piece async for piece in slow]
    assert text_of(pieces) == expected
    assert len(pieces) < 30
