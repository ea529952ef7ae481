from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.core.errors import ConfigError, InvalidField, InvalidRequest
from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.runtimes.generation.text_model import TextModel
from tests.support.model_hosts import HostOf, ModelHost, on_model_loop
from tests.support.served_text_models import PROMPTS, greedy, made, text_of
from tests.system.runtimes.generation.conftest import ServeTiny

_PRECISE: Final = {"INFERENCE_PRECISION_HINT": "f32"}
_SCHEMA: Final = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'


def _proposing(how: str, folder: Path) -> dict[str, Any]:
    if how == "draft":
        return {"plugin_config": _PRECISE, "draft_path": folder}
    return {"plugin_config": {**_PRECISE, "prompt_lookup": True}}


async def _texts(model: TextModel, requests: list[GenerationRequest]) -> list[str]:
    texts = [""] * len(requests)

    async def generate(place: int, request: GenerationRequest) -> None:
        texts[place] = text_of(await made(model, request))

    async with trio.open_nursery() as nursery:
        for place, request in enumerate(requests):
            nursery.start_soon(generate, place, request)
    return texts


_REQUESTS: Final = [
    *(greedy(prompt, tokens) for tokens in (1, 2, 90) for prompt in PROMPTS),
    GenerationRequest(
        "hello", Sampling(max_tokens=60, temperature=0), grammar=Grammar(GrammarKind.JSON_SCHEMA, _SCHEMA)
    ),
]


@pytest.fixture(scope="module", params=["draft", "lookup"])
def proposer(request: pytest.FixtureRequest, host_of: HostOf, tiny_folder: Path) -> ModelHost:
    return host_of(**_proposing(request.param, tiny_folder))


@pytest.fixture(scope="module")
def expected(host_of: HostOf) -> list[str]:
    made_without: list[str] = []
    host = host_of(plugin_config=_PRECISE)

    async def make() -> None:
        made_without.extend(await _texts(host.model, _REQUESTS))

    host.run(make)
    return made_without


@on_model_loop
async def test_texts_are_those_made_without_proposals(proposer: TextModel, expected: list[str]) -> None:
    async with proposer.generate(greedy("the inn", 1500)) as generation:
        await anext(aiter(generation))
    assert await _texts(proposer, _REQUESTS) == expected
    assert proposer.limits.context_length == 2048


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
