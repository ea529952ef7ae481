from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trio

from ovmstrio.config.specs import LoraAdapter
from ovmstrio.core.errors import ConfigError, InvalidField, ModelFailure
from ovmstrio.core.generation import GenerationChunk, GenerationRequest
from tests.support.lora_adapters import (
    PRECISE,
    quantize,
    random_matrices,
    write_adapter,
    write_merged_folder,
    write_named_folder,
)
from tests.support.served_in_thread import serving_in_thread
from tests.support.served_text_models import greedy, made, serve_text_model, text_of
from tests.support.system_servers import write_config
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


async def test_adapted_model_has_no_most_likely_tokens(base: Path, adapter: Path) -> None:
    given = LoraAdapter(name="m", path=adapter)
    async with serve_text_model(name="m", path=base, adapter=given) as model:
        for refused, field in (
            (replace(_SCORED, top_logprobs=2), "top_logprobs"),
            (replace(_SCORED, prompt_logprobs=0), "prompt_logprobs"),
        ):
            with pytest.raises(InvalidField, match=f"^{field} is not supported for a model with a LoRA adapter"):
                await made(model, refused)


async def test_draft_model_has_no_part_in_the_adapter(
    base: Path, merged: Path, adapter: Path, expected: list[GenerationChunk]
) -> None:
    drafted = await _pieces(base, adapter, greedy("hello", 24), draft=merged)
    assert text_of(drafted) == text_of(expected)
    # Every proposal of a model that is equal to the adapted one is accepted.
    assert max(piece.tokens for piece in drafted) >= 6


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


class _Client:
    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def post(self, path: str, **body: Any) -> tuple[int, str]:
        answer = self._http.post(path, json=body)
        return answer.status_code, answer.text

    def parents(self) -> dict[str, str | None]:
        return {each["id"]: each["parent"] for each in self._http.get("/v1/models").json()["data"]}

    def text(self, model: str) -> str:
        body = {"model": model, "prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return str(self._http.post("/v1/completions", json=body).json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def client(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Client]:
    """Serve the model, and an adapter of the configuration that is not loaded."""
    entry: dict[str, Any] = {"name": "base", "base_path": str(base), "cache_size": 0.002, "plugin_config": PRECISE}
    entry["lora_adapters"] = [{"name": "configured", "path": str(adapter)}]
    config = write_config(tmp_path_factory.mktemp("served"), text_model_config_list=[{"config": entry}])
    with (
        serving_in_thread(config_path=config, model_control="explicit", load_model="base") as server,
        httpx.Client(base_url=f"http://{server.http}", trust_env=False, timeout=120) as http,
    ):
        yield _Client(http)


def test_adapters_are_loaded_and_unloaded_while_the_server_runs(
    client: _Client, adapter: Path, expected: list[GenerationChunk]
) -> None:
    assert client.parents() == {"base": None}
    added = client.post("/v1/load_lora_adapter", lora_name="sql", lora_path=str(adapter))
    assert added == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert client.post("/v2/repository/models/configured/load")[0] == 200
    assert client.parents() == {"base": None, "configured": "base", "sql": "base"}
    assert client.text("sql") == client.text("configured") == text_of(expected) != client.text("base")
    removed = client.post("/v1/unload_lora_adapter", lora_name="sql")
    assert removed == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert client.post("/v2/repository/models/configured/unload")[0] == 200
    assert client.parents() == {"base": None}
    assert client.post("/v1/unload_lora_adapter", lora_name="sql")[0] == 404


def test_load_with_settings_replaces_those_of_the_adapter(client: _Client, adapter: Path) -> None:
    settings = {"parent": "base", "path": str(adapter), "alpha": 0.0}
    loaded = client.post("/v2/repository/models/mine/load", parameters={"config": json.dumps(settings)})
    assert loaded == (200, "")
    assert client.text("mine") == client.text("base")
    again = {"lora_name": "mine", "lora_path": str(adapter)}
    status, error = client.post("/v1/load_lora_adapter", **again)
    assert (status, "The lora adapter 'mine' has already been loaded." in error) == (400, True)
    assert client.post("/v1/load_lora_adapter", **again, load_inplace=True, parent="base")[0] == 200
    assert client.text("mine") != client.text("base")
    assert client.post("/v1/unload_lora_adapter", lora_name="mine")[0] == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x"}, "lora_path: expected a text that is not empty"),
        ({"lora_name": "x", "lora_path": "nothing"}, "no LoRA adapter"),
        ({"lora_name": "x", "lora_path": "a", "parent": "y"}, "expected a configured model that generates text"),
        ({"lora_name": "base", "lora_path": "a"}, "the name is configured for a text model"),
        ({"lora_name": "x", "lora_path": "a", "rank": 4}, "Unknown parameter: 'rank'"),
    ],
)
def test_unusable_adapters_are_errors_of_the_client(client: _Client, body: dict[str, Any], message: str) -> None:
    status, error = client.post("/v1/load_lora_adapter", **body)
    assert (status, message in error) == (400, True)
    assert client.parents() == {"base": None}


def test_base_model_is_not_unloaded_as_an_adapter(client: _Client) -> None:
    assert client.post("/v1/unload_lora_adapter", lora_name="base")[0] == 404
    assert client.parents() == {"base": None}


@pytest.mark.parametrize("field", ["lora_request", "adapter_id", "lora_path"])
def test_adapters_of_single_requests_are_refused(client: _Client, field: str) -> None:
    status, error = client.post("/v1/completions", model="base", prompt="hello", **{field: "sql"})
    assert (status, "set model to the adapter's name" in error) == (400, True)
