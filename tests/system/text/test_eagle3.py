from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import pytest
import trio

from ovmstrio.core.errors import InvalidField, InvalidRequest, ModelFailure
from ovmstrio.core.generation import Finish, GenerationRequest, Grammar, GrammarKind, Sampling
from ovmstrio.inference.engine.lora import read_adapter
from ovmstrio.text.text_model import TextModel
from tests.support.lora_adapters import write_adapter
from tests.support.served_text_models import PROMPTS, greedy, made, serve_text_model, text_of
from tests.support.tiny_eagle3 import write_tiny_eagle3

_SCHEMA: Final = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
_REQUESTS: Final = [
    *(greedy(prompt, 24) for prompt in PROMPTS[:4]),
    *(greedy(f"{number} of the inn " * 12, 12) for number in range(6)),
    replace(greedy("hello", 24), stop=("a",), n=2),
    GenerationRequest("hello", Sampling(max_tokens=24, temperature=0, repetition_penalty=1.3)),
    GenerationRequest(
        "hello", Sampling(max_tokens=40, temperature=0), grammar=Grammar(GrammarKind.JSON_SCHEMA, _SCHEMA)
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_eagle3(tmp_path_factory.mktemp("eagle3"))


def _serve(path: Path, **settings: Any) -> Any:
    return serve_text_model(
        name="m", path=path, cache_size=0.01, plugin_config={"INFERENCE_PRECISION_HINT": "f32"}, **settings
    )


async def _answers(model: TextModel) -> list[tuple[str, int, Finish | None]]:
    answers: list[tuple[str, int, Finish | None]] = [("", 0, None)] * len(_REQUESTS)

    async def generate(place: int, request: GenerationRequest) -> None:
        pieces = await made(model, request)
        answers[place] = text_of(pieces), sum(piece.tokens for piece in pieces), pieces[-1].finish

    async with trio.open_nursery() as nursery:
        for place, request in enumerate(_REQUESTS):
            nursery.start_soon(generate, place, request)
    return answers


async def test_answers_are_those_without_the_draft_model(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    async with _serve(target) as model:
        expected = await _answers(model)
    async with _serve(target, draft_path=draft) as model:
        assert await _answers(model) == expected
        sampled = GenerationRequest("hello", Sampling(max_tokens=30, temperature=1.2, seed=1, ignore_eos=True))
        assert sum(piece.tokens for piece in await made(model, sampled)) == 30
        threshold = GenerationRequest("hello", Sampling(assistant_confidence_threshold=0.4))
        with pytest.raises(InvalidField, match="assistant_confidence_threshold is not supported with an EAGLE-3"):
            await made(model, threshold)
        with pytest.raises(InvalidRequest, match="the prompt has 1 token, expected at least 2"):
            await made(model, GenerationRequest((7,), Sampling(max_tokens=4)))


@pytest.mark.parametrize(
    ("mode", "message"), [("other", "or a model of EAGLE-3"), ("dflash_mode", "DFlash is not supported")]
)
async def test_other_draft_models_are_refused_by_the_load(
    tmp_path: Path, folders: tuple[Path, Path], mode: str, message: str
) -> None:
    target, draft = folders
    shutil.copytree(draft, tmp_path / "draft")
    model = ov.Core().read_model(draft / "openvino_model.xml")
    other = ov.Model(model.get_results(), model.get_parameters())
    other.set_rt_info("True", [mode])
    ov.save_model(other, tmp_path / "draft" / "openvino_model.xml")
    with pytest.raises(ModelFailure, match=message):
        async with _serve(target, draft_path=tmp_path / "draft"):
            pass


def test_adapter_fits_the_names_of_an_exported_model(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    parts = {"A": (4, 32), "B": (32, 4)}
    names = [
        f"layers.{layer}.self_attn.{name}" for layer in (1, 9) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    matrices = {
        f"base_model.model.model.{name}.lora_{part}.weight": np.zeros(shape, np.float32)
        for name in names
        for part, shape in parts.items()
    }
    adapter = write_adapter(tmp_path, matrices, lora_alpha=8)
    assert read_adapter(adapter, folders[0]).scale == 2.0
