from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from ovmstrio.config.specs import LoraAdapter
from ovmstrio.core.errors import ConfigError, ModelFailure
from ovmstrio.core.generation import GenerationChunk, GenerationRequest
from tests.support.lora_adapters import (
    PRECISE,
    quantize,
    random_matrices,
    write_adapter,
    write_merged_folder,
    write_named_folder,
)
from tests.support.served_text_models import greedy, made, serve_text_model, text_of
from tests.support.tiny_llm import write_tiny_folder, write_tiny_gguf


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_named_folder(tmp_path_factory.mktemp("named"))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_merged_folder(tmp_path_factory.mktemp("merged"), random_matrices(), 4.0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), random_matrices(), r=4, lora_alpha=16)


async def _pieces(
    path: Path, adapter: Path | None, request: GenerationRequest, *, alpha: float = 1.0, draft: Path | None = None
) -> list[GenerationChunk]:
    given = None if adapter is None else LoraAdapter(name="adapted", path=adapter, alpha=alpha)
    settings: dict[str, Any] = {"cache_size": 0.002, "plugin_config": PRECISE, "draft_path": draft}
    async with serve_text_model(name="m", path=path, adapter=given, **settings) as model:
        return await made(model, request)


_SCORED: Final = replace(greedy("hello", 24), logprobs=True)


@pytest.fixture(scope="module")
def expected(merged: Path) -> list[GenerationChunk]:
    """Return the text of the merged model."""
    return trio.run(partial(_pieces, merged, None, _SCORED))


def _tokens(pieces: list[GenerationChunk]) -> list[int]:
    return [each.id for piece in pieces for each in piece.logprobs]


def _logprobs(pieces: list[GenerationChunk]) -> list[float]:
    return [each.logprob or 0.0 for piece in pieces for each in piece.logprobs]


async def test_adapter_gives_the_text_of_the_merged_model(
    tmp_path: Path, base: Path, adapter: Path, expected: list[GenerationChunk]
) -> None:
    file = write_adapter(tmp_path, random_matrices()) / "adapter_model.safetensors"
    for adapted in (await _pieces(base, adapter, _SCORED), await _pieces(base, file, _SCORED, alpha=4.0)):
        assert _tokens(adapted) == _tokens(expected)
        assert _logprobs(adapted) == pytest.approx(_logprobs(expected), abs=1e-3)


async def test_adapter_applies_to_compressed_weights(
    tmp_path: Path, adapter: Path, expected: list[GenerationChunk]
) -> None:
    low = quantize(write_named_folder(tmp_path))
    plain, adapted = await _pieces(low, None, _SCORED), await _pieces(low, adapter, _SCORED)
    assert _tokens(adapted)[0] == _tokens(expected)[0] != _tokens(plain)[0]
    assert _logprobs(adapted)[0] == pytest.approx(_logprobs(expected)[0], abs=0.1)


async def test_draft_model_has_no_part_in_the_adapter(
    base: Path, merged: Path, adapter: Path, expected: list[GenerationChunk]
) -> None:
    drafted = await _pieces(base, adapter, greedy("hello", 24), draft=merged)
    assert text_of(drafted) == text_of(expected)
    # Every proposal of a model that is equal to the adapted one is accepted.
    assert max(piece.tokens for piece in drafted) == 6


async def test_adapter_of_another_model_is_refused_by_the_load(tmp_path: Path, adapter: Path) -> None:
    other = "layers.0.mlp.down_proj: the model has no such layer; .*; and 1 more"
    with pytest.raises(ModelFailure, match=rf"the model cannot be loaded: LoRA adapter .*{other}"):
        await _pieces(write_tiny_folder(tmp_path), adapter, _SCORED)


async def test_adapter_of_a_gguf_file_is_refused_by_the_load(tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(ConfigError, match="LoRA adapters fit no model converted from GGUF"):
        await _pieces(write_tiny_gguf(tmp_path / "tiny.gguf"), adapter, _SCORED)


async def test_missing_adapter_is_refused_by_the_load(tmp_path: Path, base: Path) -> None:
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "adapter_model.bin"):
        with pytest.raises(ConfigError, match=r"expected a folder with adapter_model\.safetensors"):
            await _pieces(base, path, _SCORED)
