from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
import trio
import trio.testing

from ovmstrio.core.errors import (
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    InvalidField,
    InvalidRequest,
    Overloaded,
)
from ovmstrio.core.generation import (
    Conversation,
    Finish,
    GenerationChunk,
    GenerationRequest,
    Grammar,
    GrammarKind,
    Sampling,
    TokenLogprob,
)
from ovmstrio.server.check import check_config
from ovmstrio.text.text_model import TextModel
from tests.support.served_text_models import (
    PROMPTS,
    HostOf,
    ModelHost,
    greedy,
    made,
    on_model_loop,
    text_of,
    with_settings,
)
from tests.support.tiny_llm import CHAT_TEMPLATE, CONTEXT, VOCABULARY, bound_tokenizer
from tests.system.text.conftest import ServeTiny

_PRECISE: Final = {"INFERENCE_PRECISION_HINT": "f32"}
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


@pytest.mark.parametrize("mode", ["JINJA", "MINJA"])
@pytest.mark.parametrize("content", ["the men ", "", "<|im_end|>", "日\n\n"])
def test_answer_continues_the_final_message(host_of: HostOf, content: str, mode: str) -> None:
    host = host_of(chat_template_mode=mode)

    async def check() -> None:
        prompt = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"
        messages = {"role": "user", "content": "hi"}, {"role": "assistant", "content": content}
        options = {"add_generation_prompt": False}
        conversation = Conversation(messages, template_options=options, continues_final_message=True)
        tokens = tuple(map(int, (await host.model.tokenize([prompt], add_special_tokens=False))[0]))
        async with host.model.generate(greedy(conversation, 20)) as generation:
            pieces = [piece async for piece in generation]
        assert generation.prompt_tokens == len(tokens)
        assert text_of(pieces) == text_of(await made(host.model, greedy(tokens, 20)))

    host.run(check)


@pytest.mark.parametrize("mode", ["JINJA", "MINJA"])
def test_tokens_of_a_conversation_are_those_of_its_prompt_and_have_texts(host_of: HostOf, mode: str) -> None:
    host = host_of(chat_template_mode=mode)

    async def check() -> None:
        prompt = "<|im_start|>user\nthe \u4e2d<|im_end|>\n<|im_start|>assistant\n"
        conversation = Conversation(({"role": "user", "content": "the \u4e2d"},))
        row = tuple(map(int, await host.model.tokenize_conversation(conversation)))
        (expected,) = await host.model.tokenize([prompt], add_special_tokens=False)
        assert row == tuple(map(int, expected))
        assert await host.model.detokenize(row) == prompt
        assert await host.model.detokenize(()) == ""
        texts = await host.model.token_texts(row)
        assert (texts[0], texts[-1], len(texts)) == ("<|im_start|>", "\n", len(row))
        # The character is three tokens, of which none is text.
        assert texts.count("\ufffd") == 3
        assert "".join(texts).replace("\ufffd" * 3, "\u4e2d") == prompt
        for refused in (host.model.detokenize, host.model.token_texts):
            with pytest.raises(InvalidRequest, match=f"unknown token: {len(VOCABULARY)}"):
                await refused((len(VOCABULARY),))

    host.run(check)


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


@pytest.mark.parametrize(
    "prompt", [tuple(range(5, 45)), "of the men in the barn", Conversation(({"role": "user", "content": "hi"},))]
)
@on_model_loop
async def test_long_prompts_are_truncated_on_request(model: TextModel, prompt: Any) -> None:
    tokens = prompt
    if not isinstance(prompt, tuple):
        text = prompt if isinstance(prompt, str) else "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        tokens = tuple(map(int, (await model.tokenize([text], add_special_tokens=isinstance(prompt, str)))[0]))
    for limit, truncates_end, expected in (
        (4, False, tokens[-4:]),
        (4, True, tokens[:4]),
        (1000, False, tokens),
        (-1, False, tokens),
    ):
        asked = replace(greedy(prompt, 12), prompt_limit=limit, truncates_end=truncates_end)
        async with model.generate(asked) as generation:
            pieces = [piece async for piece in generation]
        assert generation.prompt_tokens == len(expected)
        assert text_of(pieces) == text_of(await made(model, greedy(expected, 12)))


@on_model_loop
async def test_prompt_longer_than_the_context_is_truncated_to_leave_room(model: TextModel) -> None:
    asked = replace(greedy("of the men " * CONTEXT, 20), prompt_limit=-1)
    async with model.generate(asked) as generation:
        pieces = [piece async for piece in generation]
    assert (generation.prompt_tokens, sum(piece.tokens for piece in pieces)) == (CONTEXT - 20, 20)


@on_model_loop
async def test_text_has_no_bad_words(model: TextModel) -> None:
    whole = text_of(await made(model, greedy("hello", 60)))
    words = tuple(re.findall(r"[!-~]{2}", whole))[:5]
    assert words
    other = text_of(
        await made(model, replace(greedy("hello", 60), bad_words=(*words, f"{words[0]} more", "abc", "bcd")))
    )
    assert len(other) > 10
    assert not [word for word in words if word in other]
    with pytest.raises(InvalidField, match="bad_words cannot be combined with response_format") as refused:
        await made(model, replace(_request(_saying("fine")), bad_words=words))
    assert refused.value.field == "bad_words"


async def test_prompts_are_read_beyond_the_bound_of_the_tokenizer(
    serve_tiny: ServeTiny, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = bound_tokenizer(Path(shutil.copytree(tiny_folder, tmp_path / "bound")), 64)
    prompt = "the " * 137
    async with serve_tiny(path=folder) as model:
        assert model.limits.context_length == CONTEXT
        (tokens,) = await model.tokenize([prompt])
        assert len(tokens) == 2 * 137
        async with model.generate(greedy(prompt, 8)) as generation:
            assert generation.prompt_tokens == 2 * 137
        text = text_of(await made(model, greedy(prompt, 8)))
        assert text == text_of(await made(model, greedy(tuple(map(int, tokens)), 8)))
        with pytest.raises(ContextExceeded, match=f"maximum context length is {CONTEXT} tokens"):
            await made(model, greedy("the " * CONTEXT, 1))


async def test_prompts_that_the_tokenizer_cuts_are_refused(
    serve_tiny: ServeTiny, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = bound_tokenizer(Path(shutil.copytree(tiny_folder, tmp_path / "bound")), 64, by_minimum=False)
    async with serve_tiny(path=folder) as model:
        assert model.limits.context_length == 63
        async with model.generate(greedy("the " * 31, 1)) as generation:
            assert generation.prompt_tokens == 62
        for count in (32, 137):
            with pytest.raises(ContextExceeded, match="maximum context length is 63 tokens"):
                await made(model, greedy("the " * count, 1))


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


@pytest.mark.parametrize("seed", [3, 2**64 - 1, -(2**63)])
@on_model_loop
async def test_choices_of_one_request_have_reproducible_seeds(model: TextModel, seed: int) -> None:
    request = GenerationRequest("hello", Sampling(max_tokens=30, temperature=1.0, seed=seed, ignore_eos=True), n=3)
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
        request = replace(greedy("hello", 200), stop=("never", stop), includes_stop=keeps)
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


@on_model_loop
async def test_echoed_prompt_has_its_most_likely_tokens(model: TextModel) -> None:
    prompt = tuple(range(40, 140))
    answer = [
        each for piece in await made(model, replace(greedy(prompt, 20), logprobs=True)) for each in piece.logprobs
    ]
    assert all(each.top == ((each.data, each.logprob, each.id),) for each in answer), "of a greedy text, the token"
    echoed = replace(greedy((*prompt, *(each.id for each in answer)), 0), echo=True, logprobs=True)
    first, *places = [each for piece in await made(model, echoed) for each in piece.logprobs]
    assert first.top == ()
    best = [(top.data, top.logprob) for each in places for top in each.top]
    assert len(best) == len(places) == 119
    assert all(found[1] >= (each.logprob or 0.0) for found, each in zip(best, places, strict=True))
    assert sum(found[0] == each.data for found, each in zip(best[-20:], places[-20:], strict=True)) >= 18
    assert sum(found[0] != each.data for found, each in zip(best[:99], places, strict=False)) > 80
    sampled = replace(greedy(prompt, 5), sampling=Sampling(temperature=1.0, max_tokens=5), logprobs=True)
    assert all(each.top == () for piece in await made(model, sampled) for each in piece.logprobs)


def _log_probabilities(folder: Path, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return the log-probabilities after each token, from one run of the folder's model."""
    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", _PRECISE)
    length = len(tokens)
    given = {
        "input_ids": np.array([tokens]),
        "attention_mask": np.ones((1, length), np.int64),
        "position_ids": np.arange(length)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    logits = compiled({each.any_name: given[each.any_name] for each in compiled.inputs})["logits"][0].astype(np.float64)
    result: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return result


def _check_scores(tokens: Sequence[TokenLogprob], top: int, after: npt.NDArray[np.float64]) -> None:
    """Compare the scores of the last tokens of a text with log-probabilities after each of its tokens."""
    for each, row in zip(tokens, after[-len(tokens) :], strict=True):
        values = [one.logprob for one in each.top]
        assert each.logprob == pytest.approx(row[each.id], abs=2e-3)
        assert values == pytest.approx(np.sort(row)[: -top - 1 : -1], abs=2e-3)
        assert values == pytest.approx(row[[one.id for one in each.top]], abs=2e-3)
        assert abs(each.rank - 1 - (row > row[each.id]).sum()) <= 1


@pytest.mark.parametrize("echo", [False, True])
def test_most_likely_tokens_are_those_of_the_model(host_of: HostOf, tiny_folder: Path, *, echo: bool) -> None:
    host = host_of(plugin_config=_PRECISE)
    prompt = tuple(range(60, 140))
    sampling = Sampling(max_tokens=90, temperature=1.0, seed=5, ignore_eos=True)
    request = GenerationRequest(prompt, sampling, n=2, echo=echo)

    async def check() -> None:
        plain = await made(host.model, replace(request, logprobs=True))
        scored = await made(host.model, replace(request, logprobs=True, top_logprobs=5, prompt_logprobs=3))
        of_prompt = [each for piece in scored for each in piece.prompt_logprobs]
        assert [(each.id, each.offset) for each in of_prompt] == [(token, 0) for token in prompt]
        assert (of_prompt[0].logprob, of_prompt[0].top, of_prompt[0].rank) == (None, (), 0)
        for index in (0, 1):
            assert text_of(scored, index) == text_of(plain, index)
            found, before = (_tokens_of(pieces, index) for pieces in (scored, plain))
            places = [[(each.id, each.data, each.offset) for each in tokens] for tokens in (found, before)]
            assert places[0] == places[1]
            tokens = [*prompt, *(each.id for each in found[-90:])]
            after = await trio.to_thread.run_sync(_log_probabilities, tiny_folder, tokens)
            _check_scores(found[1:] if echo else found, 5, after[:-1])
            _check_scores(of_prompt[1:], 3, after[: len(prompt) - 1])
        only = await made(host.model, replace(request, prompt_logprobs=3))
        assert [each for piece in only for each in piece.prompt_logprobs] == of_prompt
        assert not any(piece.logprobs for piece in only)

    host.run(check)


def _tokens_of(pieces: list[GenerationChunk], index: int) -> list[TokenLogprob]:
    return [each for piece in pieces if piece.index == index for each in piece.logprobs]


@on_model_loop
async def test_scored_texts_end_at_stop_strings_and_with_their_clients(model: TextModel) -> None:
    plain = text_of(await made(model, greedy("hello", 200)))
    request = replace(greedy("hello", 200), stop=(plain[20:25],), logprobs=True)
    scored, expected = await made(model, replace(request, top_logprobs=2)), await made(model, request)
    assert text_of(scored) == text_of(expected) == plain[:20]
    assert sum(piece.tokens for piece in scored) == sum(piece.tokens for piece in expected)
    found, before = _tokens_of(scored, 0), _tokens_of(expected, 0)
    assert [each.id for each in found] == [each.id for each in before]
    assert {len(each.top) for each in found} == {2}
    with trio.move_on_after(0.5):
        await made(model, replace(greedy("hello", 1500), n=4, logprobs=True, top_logprobs=2))
    assert text_of(await made(model, replace(request, top_logprobs=2))) == plain[:20]
    assert not model.open_requests


_SPLIT_TEXT: Final = "日🚀ok é\ufffd the end"
"""Each of its characters beyond ASCII is several tokens of the model."""


def places_of(text: str, tokens: list[bytes]) -> list[int]:
    """Return the index of the character that each token begins with or belongs to."""
    ends = [len("".join(text[: index + 1]).encode()) for index in range(len(text))]
    starts = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
    return [sum(end <= start for end in ends) for start in starts]


@pytest.mark.parametrize("echo", [False, True])
@on_model_loop
async def test_tokens_of_a_text_have_its_bytes_and_places(model: TextModel, *, echo: bool) -> None:
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": _SPLIT_TEXT}}
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(form))
    request = GenerationRequest(_SPLIT_TEXT, Sampling(max_tokens=60), logprobs=True, echo=echo, grammar=grammar)
    pieces = await made(model, request)
    expected = _SPLIT_TEXT * (1 + echo)
    logprobs = [each for piece in pieces for each in piece.logprobs]
    tokens = [each.data for each in logprobs]
    assert text_of(pieces) == expected
    assert len(tokens) > len(expected)
    assert b"".join(tokens) == expected.encode()
    assert [each.offset for each in logprobs] == places_of(expected, tokens)


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
            with pytest.raises(Overloaded, match="2 requests are queued") as caught:
                await made(model, greedy("one too many", 1))
            assert caught.value.retry_after_seconds >= 1
        assert ended == [300, 300, 300]


async def test_request_that_cannot_start_within_the_queue_time_is_refused(serve_tiny: ServeTiny) -> None:
    async with serve_tiny(max_num_seqs=1, max_queue_time=0.2) as model:
        assert len(await made(model, greedy("short", 1))) == 1
        async with model.generate(greedy("first", 1500)) as first:
            await anext(aiter(first))
            with pytest.raises(Overloaded, match="max_queue_time"):
                await made(model, greedy("too late", 1))
        assert len(await made(model, greedy("again", 1))) == 1


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


_SCHEMA: Final = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'


def _proposing(how: str, folder: Path) -> dict[str, Any]:
    if how == "draft":
        return {"plugin_config": _PRECISE, "draft_path": folder}
    return {"plugin_config": _PRECISE, "prompt_lookup": True}


_Answer = tuple[str, int, Finish | None]
"""Text, number of tokens and finish reason."""


async def _answers(model: TextModel, requests: list[GenerationRequest]) -> list[list[_Answer]]:
    """Return the answers to requests at the same time, each with all its texts."""
    answers: list[list[_Answer]] = [[]] * len(requests)

    async def generate(place: int, request: GenerationRequest) -> None:
        pieces = await made(model, request)
        answers[place] = [
            (
                text_of(pieces, index),
                sum(piece.tokens for piece in pieces if piece.index == index),
                next((piece.finish for piece in pieces if piece.finish and piece.index == index), None),
            )
            for index in range(request.n)
        ]

    async with trio.open_nursery() as nursery:
        for place, request in enumerate(requests):
            nursery.start_soon(generate, place, request)
    return answers


def _with_sampling(prompt: str, **sampling: Any) -> GenerationRequest:
    request = greedy(prompt, 60)
    return replace(request, sampling=replace(request.sampling, **sampling))


# More proposals than the tokens of a step, and more prompts than a step reads.
_REQUESTS: Final = [
    *(greedy(prompt, tokens) for tokens in (1, 2, 90) for prompt in PROMPTS),
    *(greedy(f"{number} of the inn " * 12, 40) for number in range(24)),
    *(replace(greedy(prompt, 60), stop=(" a",)) for prompt in PROMPTS),
    *(replace(greedy(prompt, 60), stop=("the",), includes_stop=True, n=2) for prompt in PROMPTS[:2]),
    _with_sampling("hello", max_tokens=300, ignore_eos=False),
    _with_sampling("hello", max_tokens=300, ignore_eos=False, min_tokens=50),
    _with_sampling("hello", repetition_penalty=1.3),
    _with_sampling("hello", frequency_penalty=0.8, presence_penalty=0.4),
    GenerationRequest(
        "hello", Sampling(max_tokens=60, temperature=0), grammar=Grammar(GrammarKind.JSON_SCHEMA, _SCHEMA)
    ),
]


@pytest.fixture(scope="module", params=["draft", "lookup"])
def proposer(request: pytest.FixtureRequest, host_of: HostOf, tiny_folder: Path) -> ModelHost:
    return host_of(**_proposing(request.param, tiny_folder))


@pytest.fixture(scope="module")
def expected(host_of: HostOf) -> list[list[_Answer]]:
    made_without: list[list[_Answer]] = []
    host = host_of(plugin_config=_PRECISE)

    async def make() -> None:
        made_without.extend(await _answers(host.model, _REQUESTS))

    host.run(make)
    return made_without


@on_model_loop
async def test_answers_are_those_made_without_proposals(proposer: TextModel, expected: list[list[_Answer]]) -> None:
    async with proposer.generate(greedy("the inn", 1500)) as generation:
        await anext(aiter(generation))
    assert await _answers(proposer, _REQUESTS) == expected
    assert proposer.limits.context_length == 2048


@pytest.mark.parametrize("how", ["draft", "lookup"])
async def test_answers_that_fill_the_cache_are_those_made_without_proposals(
    how: str, serve_tiny: ServeTiny, tiny_folder: Path
) -> None:
    # Each answer may grow to a third of the cache, and none is suspended.
    requests = [greedy(f"number {number}", 100) for number in range(8)]
    settings = {"cache_size": 0.0002, "kv_overcommit": 2.0}
    async with serve_tiny(**{**settings, "plugin_config": _PRECISE}) as model:
        expected = await _answers(model, requests)
    async with serve_tiny(**{**settings, **_proposing(how, tiny_folder)}) as model:
        assert await _answers(model, requests) == expected


@on_model_loop
async def test_several_tokens_come_in_one_step(proposer: TextModel) -> None:
    asked = greedy("hello", 90)
    more = replace(asked, sampling=replace(asked.sampling, num_assistant_tokens=8))
    for request in (asked, more):
        assert max(piece.tokens for piece in await made(proposer, request)) > 3


@on_model_loop
async def test_sampled_texts_have_all_their_tokens(proposer: TextModel) -> None:
    sampling = Sampling(max_tokens=80, temperature=1.2, ignore_eos=True)
    async with trio.open_nursery() as nursery:
        for seed in range(12):
            nursery.start_soon(_check_length, proposer, GenerationRequest(PROMPTS[0], replace(sampling, seed=seed)))


async def _check_length(model: TextModel, asked: GenerationRequest) -> None:
    assert sum(piece.tokens for piece in await made(model, asked)) == 80


@pytest.mark.parametrize("proposer", ["draft"], indirect=True)
@on_model_loop
async def test_fields_unsupported_with_a_draft_are_refused(proposer: TextModel) -> None:
    beams, scored = Sampling(best_of=2), GenerationRequest("hello", logprobs=True)
    for field, asked in (("best_of", GenerationRequest("hello", beams)), ("logprobs", scored)):
        with pytest.raises(InvalidField, match=f"{field}.* not supported for this model") as caught:
            await made(proposer, asked)
        assert (caught.value.field, caught.value.code) == (field, "unsupported_parameter")
    with pytest.raises(InvalidField, match="max_ngram_size is not supported: this model is served without"):
        await made(proposer, GenerationRequest("hello", Sampling(max_ngram_size=2)))
    with pytest.raises(InvalidField, match="num_assistant_tokens is at most 128 here"):
        await made(proposer, GenerationRequest("hello", Sampling(num_assistant_tokens=129)))
    threshold = Sampling(assistant_confidence_threshold=0.4, max_tokens=20, ignore_eos=True, temperature=0)
    assert sum(piece.tokens for piece in await made(proposer, GenerationRequest("hello", threshold))) == 20


@pytest.mark.parametrize(("field", "value"), [("num_assistant_tokens", 3), ("assistant_confidence_threshold", 0.5)])
@on_model_loop
async def test_fields_of_proposals_are_refused_without_them(model: TextModel, field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} is not supported"):
        await made(model, GenerationRequest("hello", Sampling(**{field: value})))  # type: ignore[arg-type]


async def test_missing_draft_is_refused_by_the_load(serve_tiny: ServeTiny, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(ConfigError, match="draft without openvino_model"):
        async with serve_tiny(draft_path=tmp_path / "draft"):
            pass


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


def _calls(pieces: list[GenerationChunk]) -> list[tuple[str, str]]:
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
    once = await made(model, _request(_saying(written), tools=_TOOLS, returns_first_call_only=True))
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


async def test_check_reports_what_it_detected_and_unknown_formats(tiny_folder: Path, tmp_path: Path) -> None:
    tools = CHAT_TEMPLATE + "{% for tool in tools %}{% endfor %}"
    folders: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
        "template": ({}, tools + "<tool_call></tool_call><think>", {}),
        "architecture": ({"architectures": ["Qwen2ForCausalLM"]}, tools, {"max_model_len": 100}),
        "unknown": ({}, tools, {"reasoning_parser": "qwen3"}),
    }
    entries = []
    for name, (config, template, settings) in folders.items():
        folder = Path(shutil.copytree(tiny_folder, tmp_path / name))
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT, **config}))
        (folder / "chat_template.jinja").write_text(template)
        entries.append({"config": {"name": name, "base_path": name, "cache_size": 0.01, **settings}})
    document = {"model_config_list": [], "text_model_config_list": entries}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with trio.fail_after(120):
        report = await check_config(tmp_path / "config.json")
    detected = {each.model: {one.setting: (one.value, one.source) for one in each.detected} for each in report.loaded}
    files = {"task": ("text_generation", "openvino_detokenizer.xml"), "chat_template": ("JINJA", "chat_template.jinja")}
    assert detected == {
        "template": {
            **files,
            "max_model_len": (CONTEXT, "config.json"),
            "tool_parser": ("hermes3", "chat_template.jinja"),
            "reasoning_parser": ("qwen3", "chat_template.jinja"),
        },
        "architecture": {
            **files,
            "max_model_len": (100, "option"),
            "tool_parser": ("hermes3", "config.json"),
            "reasoning_parser": ("none", "chat_template.jinja"),
        },
        "unknown": {
            **files,
            "max_model_len": (CONTEXT, "config.json"),
            "tool_parser": ("generic", "chat_template.jinja"),
            "reasoning_parser": ("qwen3", "option"),
        },
    }
    (problem,) = report.problems
    assert (problem.severity, problem.path) == ("warning", "text_model_config_list[2].config")
    assert problem.message == "the chat template has tools in a format without a parser"


@pytest.mark.parametrize(
    ("architectures", "template", "settings", "written", "calls"),
    [
        (["Qwen3ForCausalLM"], "{{ tools }}", {}, '<tool_call>{"name": "rest", "arguments": {}}</tool_call>', "rest"),
        (["MistralForCausalLM"], "{{ tools }}", {}, '[TOOL_CALLS][{"name": "rest", "arguments": {}}]', "rest"),
        (["LlamaForCausalLM"], "{{ tools }}", {}, '{"tool_calls": [{"name": "rest", "arguments": {}}]}', "rest"),
        (["Qwen3ForCausalLM"], "", {}, '{"tool_calls": [{"name": "rest", "arguments": {}}]}', "rest"),
        (["Qwen3ForCausalLM"], "{{ tools }}", {"tool_parser": "none"}, "<tool_call>{}</tool_call>", ""),
    ],
    ids=["qwen", "mistral", "unknown format", "template without tools", "configured parser"],
)
async def test_architecture_decides_the_parser_of_a_template_with_tools(
    serve_tiny: ServeTiny,
    tiny_folder: Path,
    tmp_path: Path,
    architectures: list[str],
    template: str,
    settings: dict[str, str],
    written: str,
    calls: str,
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + template)
    config = {"max_position_embeddings": CONTEXT, "architectures": architectures}
    (folder / "config.json").write_text(json.dumps(config))
    async with serve_tiny(base_path=folder, path=folder, **settings) as model:
        pieces = await made(model, _request(_saying(written), tools=_TOOLS))
    assert ([name for name, _ in _calls(pieces)], text_of(pieces)) == (([calls], "") if calls else ([], written))


@on_model_loop
async def test_constrained_text_may_end_with_its_first_token(model: TextModel) -> None:
    shortest = GenerationRequest("hello", Sampling(max_tokens=1), grammar=_saying("fine"))
    with trio.fail_after(60):
        (piece,) = await made(model, shortest)
    assert (piece.tokens, piece.finish) == (1, Finish.LENGTH)


@pytest.mark.parametrize("tool_parser", ["hermes3", "", "mistral", "qwen3coder", "gptoss", "lfm2", "kimi_k2"])
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
async def test_engine_refuses_a_grammar_with_the_place_of_its_error(model: TextModel) -> None:
    good, bad = {"type": "string", "pattern": "a+"}, {"type": "string", "pattern": "(?=a)"}
    schema = {"type": "object", "properties": {"a": good, "b": {"type": "array", "items": {"anyOf": [good, bad]}}}}
    reason = r"at \$.properties.b.items.anyOf\[1\]: .*Lookahead is not supported"
    with pytest.raises(InvalidField, match=f"response_format: {reason}") as refused:
        await made(model, _request(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))))
    assert refused.value.field == "response_format"
    tools = tuple(
        {"type": "function", "function": {"name": f"f{n}", "parameters": s}}
        for n, s in enumerate(({"properties": {"a": good}}, schema))
    )
    with pytest.raises(InvalidField, match=rf"tools\[1\].function.parameters: {reason}") as refused:
        await made(model, _request(tools=tools, tool_choice="required"))
    assert refused.value.field == "tools[1].function.parameters"
    for kind, text, expected in (
        (GrammarKind.REGEX, "a(b", "response_format: .*parenthesis is not closed"),
        (GrammarKind.EBNF, 'root ::= "a"\nx ::= y', 'response_format: .*at line 2, column 7: Rule "y" is not defined'),
    ):
        with pytest.raises(InvalidField, match=expected) as refused:
            await made(model, _request(Grammar(kind, text)))
        assert (refused.value.field, refused.value.code) == ("response_format", "invalid_grammar")
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
    documents = "{% if documents %}{{ documents[0].text }}{% endif %}"
    (folder / "chat_template.jinja").write_text(_LOOPS + _COMPARES_FOR_EVER + "hello" + documents)
    return host_of(base_path=folder, path=folder)


@on_model_loop
async def test_template_that_loops_or_refuses_fails_its_request(odd_model: TextModel) -> None:
    asked = _request(_saying("fine"))
    for messages, text in (
        (({"role": "user", "content": "loop"},), "line 1: too many loop iterations"),
        (_HELLO * 2, "line 2: one is enough"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            await made(odd_model, GenerationRequest(Conversation(messages), asked.sampling))
    with pytest.raises(InvalidRequest, match="leaves out the final message"):
        await made(odd_model, GenerationRequest(Conversation(_HELLO, continues_final_message=True), asked.sampling))
    assert text_of(await made(odd_model, asked)) == "fine"


@on_model_loop
async def test_documents_reach_templates_that_have_them(odd_model: TextModel) -> None:
    conversation = Conversation(_HELLO, template_options={"documents": [{"title": "a", "text": " the men"}]})
    text = text_of(await made(odd_model, greedy(conversation, 12)))
    tokens = tuple(map(int, (await odd_model.tokenize(["hello the men"], add_special_tokens=False))[0]))
    assert text == text_of(await made(odd_model, greedy(tokens, 12)))


@on_model_loop
async def test_documents_are_refused_if_the_template_has_none(model: TextModel) -> None:
    conversation = Conversation(_HELLO, template_options={"documents": [{"text": "the men"}]})
    with pytest.raises(InvalidField, match="the chat template of this model has no documents") as refused:
        await made(model, greedy(conversation, 1))
    assert refused.value.field == "documents"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [((5,) * CONTEXT, "prompt[1]"), ("of the men " * CONTEXT, "prompt"), (Conversation(_HELLO * 600), "input")],
)
@on_model_loop
async def test_error_of_a_prompt_names_its_field(model: TextModel, prompt: Any, field: str) -> None:
    with pytest.raises(ContextExceeded) as refused:
        await made(model, replace(greedy(prompt, 1), prompt_field=field))
    assert refused.value.field == field


@on_model_loop
async def test_error_of_a_grammar_names_its_field(model: TextModel) -> None:
    for grammar in (
        Grammar(GrammarKind.REGEX, "a(b", field="guided_regex"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 2}', is_strict=True, field="text.format"),
    ):
        with pytest.raises(InvalidField, match=f"^{grammar.field}: ") as refused:
            await made(model, _request(grammar))
        assert refused.value.field == grammar.field


@on_model_loop
async def test_other_requests_continue_while_a_template_runs_too_long(odd_model: TextModel) -> None:
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


_SETTINGS: Final = {"repetition_penalty": 1.3, "num_beams": 3, "min_new_tokens": 30, "eos_token_id": 1}


async def test_settings_of_the_folder_apply_to_texts_and_log_probabilities(
    serve_tiny: ServeTiny, model: ModelHost, tiny_folder: Path, tmp_path: Path
) -> None:
    plain = replace(greedy("hello", 40), logprobs=True)
    penalized = replace(plain, sampling=replace(plain.sampling, repetition_penalty=1.3))
    beams = replace(plain, sampling=replace(plain.sampling, best_of=3))
    expected: list[list[GenerationChunk]] = []

    async def make() -> None:
        expected.extend([await made(model.model, each) for each in (plain, penalized, beams)])

    await trio.to_thread.run_sync(model.run, make)
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(_SETTINGS))
    neutral = replace(plain, sampling=replace(plain.sampling, repetition_penalty=1.0, min_tokens=0))
    first = expected[1][0].logprobs[0].id
    stopping = Sampling(max_tokens=40, temperature=0, stop_token_ids=(first,))
    async with serve_tiny(path=folder) as other:
        found = [await made(other, each) for each in (neutral, plain)]
        shortest = await made(other, GenerationRequest("hello", stopping))
        stopped = await made(other, GenerationRequest("hello", replace(stopping, min_tokens=0)))
    assert sum(piece.tokens for piece in shortest) >= _SETTINGS["min_new_tokens"]
    assert sum(piece.tokens for piece in stopped) == 1
    assert [text_of(each) for each in found] == [text_of(each) for each in expected[:2]]
    assert text_of(found[0]) != text_of(found[1])
    counts = [{len(token.top) for piece in pieces for token in piece.logprobs} for pieces in (*expected, *found)]
    assert counts == [{1}, {0}, {0}, {1}, {0}]
