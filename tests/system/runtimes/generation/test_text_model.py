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
from ovmstrio.core.generation import Conversation, Finish, GenerationRequest, Sampling
from ovmstrio.runtimes.generation.text_model import TextModel
from tests.support.model_hosts import on_model_loop
from tests.support.served_text_models import PROMPTS, greedy, made, text_of
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
logprobs = [pipeline.generate([prompt], [config])[0].m_generation_ids[0] for prompt in json.loads(sys.argv[3])]
print(json.dumps(logprobs))
"""


def bare_texts(folder: Path, prompts: list[str], tokens: int) -> list[str]:
    command = [sys.executable, "-c", _BARE, str(folder), str(tokens), json.dumps(prompts)]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    texts: list[str] = json.loads(done.stdout.splitlines()[-1])
    return texts


@on_model_loop
async def test_eight_greedy_texts_at_once_are_those_of_openvino_genai(model: TextModel, tiny_folder: Path) -> None:
    texts: dict[str, str] = {}

    async def generate(model: TextModel, prompt: str) -> None:
        texts[prompt] = text_of(await made(model, greedy(prompt, 80)))

    async with trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            nursery.start_soon(generate, model, prompt)
    expected = await trio.to_thread.run_sync(bare_texts, tiny_folder, PROMPTS, 80)
    assert [texts[prompt] for prompt in PROMPTS] == expected
    assert len(set(expected)) > 3


@on_model_loop
async def test_requests_left_midway_change_no_other_text(model: TextModel) -> None:
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
async def test_messages_become_the_prompt_and_pieces_count_tokens(model: TextModel) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    chat = await made(model, greedy(Conversation(({"role": "user", "content": "hi"},)), 40))
    tokens = tuple(map(int, (await model.tokenize([prompt], add_special_tokens=False))[0]))
    assert text_of(chat) == text_of(await made(model, greedy(tokens, 40)))
    async with model.generate(greedy("hello", 25)) as generation:
        pieces = [piece async for piece in generation]
    assert (generation.prompt_tokens, sum(piece.tokens for piece in pieces)) == (5, 25)
    assert [piece.finish for piece in pieces if piece.finish] == [Finish.LENGTH]


@on_model_loop
async def test_tokens_of_many_texts_are_those_of_each_alone(model: TextModel) -> None:
    texts = ["the cat", "", "a", "\u4e2d\u6587 x", "b \ud800", "the " * 1000, " "] * 40
    together = await model.tokenize(texts)
    alone = [(await model.tokenize([text]))[0] for text in texts[:7]] * 40
    assert [list(row) for row in together] == [list(row) for row in alone]


@on_model_loop
async def test_prompt_that_leaves_no_room_is_refused_with_the_numbers(model: TextModel) -> None:
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
async def test_invalid_tokens_are_refused(model: TextModel, tokens: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="token"):
        await made(model, greedy(tokens, 1))


async def test_limits_of_the_settings_are_refused_by_their_field(serve_tiny: ServeTiny) -> None:
    async with serve_tiny(max_tokens_limit=10, best_of_limit=2) as model:
        with pytest.raises(InvalidField, match="max_tokens is at most 10") as caught:
            await made(model, greedy("hello", 11))
        assert caught.value.field == "max_tokens"
        with pytest.raises(InvalidField, match="n is at most 2"):
            await made(model, GenerationRequest("hello", n=3))
        pieces = await made(model, GenerationRequest("hello", Sampling(ignore_eos=True)))
        assert sum(piece.tokens for piece in pieces) == 10


@on_model_loop
async def test_deadline_ends_a_text_midway(model: TextModel) -> None:
    request = GenerationRequest("hello", Sampling(ignore_eos=True), deadline=trio.current_time() + 0.3)
    with pytest.raises(DeadlineExceeded):
        await made(model, request)
    assert not model.open_requests


@on_model_loop
async def test_choices_of_one_request_have_reproducible_seeds(model: TextModel) -> None:
    request = GenerationRequest("hello", Sampling(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True), n=3)
    first, second = await made(model, request), await made(model, request)
    texts = [text_of(first, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert texts == [text_of(second, index) for index in range(3)]
    assert sorted(piece.index for piece in first if piece.finish) == [0, 1, 2]


@on_model_loop
async def test_stop_string_ends_a_text_before_or_after_it(model: TextModel) -> None:
    whole = text_of(await made(model, greedy("hello", 200)))
    stop = whole[20:25]
    place = whole.index(stop)
    for keeps, expected in ((False, whole[:place]), (True, whole[:place] + stop)):
        request = replace(greedy("hello", 200), stop=("never", stop), keeps_stop=keeps)
        pieces = await made(model, request)
        assert text_of(pieces) == expected
        assert pieces[-1].finish is Finish.STOP


@on_model_loop
async def test_echoed_prompt_has_its_log_probabilities_each_time(model: TextModel) -> None:
    prompt = "the men in the barn " * 10
    request = replace(greedy(prompt, 0), echo=True, logprobs=True)
    await made(model, greedy(prompt, 5))
    first, second = await made(model, request), await made(model, request)
    both = await made(model, replace(greedy(prompt, 3), echo=True, logprobs=True))
    length = len((await model.tokenize([prompt]))[0])
    values = [each.logprob for piece in first for each in piece.logprobs]
    assert values[0] is None
    assert len(values) == length
    assert all(value is not None and value < 0 for value in values[1:])
    assert [each.logprob for piece in second for each in piece.logprobs] == values
    logprobs = [each for piece in both for each in piece.logprobs]
    assert [each.logprob for each in logprobs[:length]] == values
    assert len(logprobs) == length + 3
    assert text_of(first) == prompt
    assert text_of(both).startswith(prompt)
    assert first[-1].finish is Finish.LENGTH


async def test_requests_beyond_the_queue_are_refused_and_others_end(serve_tiny: ServeTiny) -> None:
    ended: list[int] = []

    async def generate(model: TextModel, prompt: str) -> None:
        ended.append(sum(piece.tokens for piece in await made(model, greedy(prompt, 300))))

    async with serve_tiny(max_num_seqs=2, max_queue=2) as model:
        async with model.generate(greedy("first", 1500)) as first, trio.open_nursery() as nursery:
            await anext(aiter(first))
            for number in range(3):
                nursery.start_soon(generate, model, f"number {number}")
            while model.open_requests < 4:
                await trio.lowlevel.checkpoint()
            with pytest.raises(Overloaded, match="2 requests wait") as caught:
                await made(model, greedy("one too many", 1))
            assert caught.value.retry_after_seconds >= 1
        assert ended == [300, 300, 300]


async def test_forty_requests_for_a_small_cache_all_end(serve_tiny: ServeTiny) -> None:
    ended: list[int] = []

    async def generate(model: TextModel, number: int) -> None:
        ended.append(sum(piece.tokens for piece in await made(model, greedy(f"number {number} " * 20, 150))))

    async with serve_tiny(cache_size=0.001) as model, trio.open_nursery() as nursery:
        for number in range(40):
            nursery.start_soon(generate, model, number)
    assert ended == [150] * 40


@on_model_loop
async def test_slow_reader_delays_no_other_text_and_gets_joined_pieces(model: TextModel) -> None:
    expected = text_of(await made(model, greedy("slow", 300)))
    async with model.generate(greedy("slow", 300)) as slow:
        await made(model, greedy("fast", 600))
        pieces = [piece async for piece in slow]
    assert text_of(pieces) == expected
    assert len(pieces) < 30
