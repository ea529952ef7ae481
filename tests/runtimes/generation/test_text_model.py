"""A model in a process of its own makes the same text as the library alone, for many at once, until they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from ovmstrio.core.errors import ContextExceeded, DeadlineExceeded, InvalidField, InvalidRequest
from ovmstrio.core.generation import Conversation, Finish, GenerationRequest, Piece, Prompt, Sampling
from ovmstrio.runtimes.generation.text_model import TextModel
from tests.runtimes.generation.conftest import ServeTiny
from tests.support.tiny_llm import CONTEXT, VOCABULARY

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


async def test_eight_greedy_texts_at_once_are_those_of_the_bare_library(
    serve_tiny: ServeTiny, tiny_folder: Path
) -> None:
    """Texts that are made together are those that are made alone."""
    texts: dict[str, str] = {}

    async def ask(model: TextModel, prompt: str) -> None:
        texts[prompt] = text_of(await made(model, greedy(prompt, 80)))

    async with serve_tiny() as model, trio.open_nursery() as nursery:
        for prompt in PROMPTS:
            nursery.start_soon(ask, model, prompt)
    expected = await trio.to_thread.run_sync(bare_texts, tiny_folder, PROMPTS, 80)
    assert [texts[prompt] for prompt in PROMPTS] == expected
    assert len(set(expected)) > 3


async def test_whoever_leaves_is_out_of_the_batch_and_the_others_go_on_alike(serve_tiny: ServeTiny) -> None:
    """A request that is left midway changes nobody's text, and its room is free for the next ones."""
    async with serve_tiny() as model:
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


async def test_messages_become_the_prompt_of_the_models_template(serve_tiny: ServeTiny) -> None:
    """A conversation gives the text of its rendered template."""
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    async with serve_tiny() as model:
        chat = await made(model, greedy(Conversation(({"role": "user", "content": "hi"},)), 40))
        tokens = (await model.tokenize([prompt], add_special_tokens=False))[0]
        assert text_of(chat) == text_of(await made(model, greedy(tokens, 40)))


async def test_pieces_count_the_tokens_and_the_last_one_says_why_the_text_ended(serve_tiny: ServeTiny) -> None:
    """Usage is the sum of the pieces."""
    async with serve_tiny() as model:
        async with model.generate(greedy("hello", 25)) as generation:
            pieces = [piece async for piece in generation]
        assert generation.prompt_tokens == 5
        assert sum(piece.tokens for piece in pieces) == 25
        assert [piece.finish for piece in pieces if piece.finish] == [Finish.LENGTH]


async def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_the_numbers(serve_tiny: ServeTiny) -> None:
    """The context bounds prompt and answer together, and tells both numbers."""
    async with serve_tiny() as model:
        assert model.limits.context_length == CONTEXT
        assert model.limits.vocabulary_size == len(VOCABULARY)
        with pytest.raises(ContextExceeded, match=f"at most {CONTEXT - 1} fit") as caught:
            await made(model, greedy((5,) * CONTEXT, 1))
        assert f"{CONTEXT} tokens" in str(caught.value)
        pieces = await made(model, greedy((5,) * (CONTEXT - 3), 100))
        assert sum(piece.tokens for piece in pieces) == 3
        with pytest.raises(ContextExceeded):
            await made(model, greedy("the " * 10_000_000, 1))


@pytest.mark.parametrize("tokens", [(-1, 4), (3, 100_000), ()])
async def test_tokens_that_are_none_are_refused(serve_tiny: ServeTiny, tokens: tuple[int, ...]) -> None:
    """The library would take them, and make garbage."""
    async with serve_tiny() as model:
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


async def test_a_deadline_ends_a_text_midway(serve_tiny: ServeTiny) -> None:
    """Beyond its deadline nothing is waited for, and the engine forgets the request."""
    async with serve_tiny() as model:
        asked = GenerationRequest("hello", Sampling(ignore_eos=True), deadline=trio.current_time() + 0.3)
        with pytest.raises(DeadlineExceeded):
            await made(model, asked)
        assert not model.open_requests
