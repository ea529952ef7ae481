"""Load models of embeddings and of ranks from the folders that Optimum writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.compile import ModelFile
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.text_networks import CompiledTokenizer, compile_embedder, compile_scorer, compile_tokenizer
from ovmstrio.openvino.trials import try_model
from ovmstrio.openvino.trials.model_trial import trial_of
from ovmstrio.runtimes.generation.embedding.embedding_model import EmbeddingModel
from ovmstrio.runtimes.generation.embedding.rerank_model import RerankModel
from ovmstrio.runtimes.generation.embedding.row_encoder import RowEncoder
from ovmstrio.runtimes.generation.embedding.row_texts import RowTexts
from ovmstrio.runtimes.generation.embedding.text_folder import TextFolder, read_text_folder
from ovmstrio.runtimes.generation.embedding.text_tokens import TextTokens
from ovmstrio.work.placement import run_load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.hooks import ServableHooks
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["load_embedding_model", "load_rerank_model"]

_VERSION: Final = "1"


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is loaded for any model of texts."""

    folder: TextFolder
    compiled: Compiled
    tokenizer: CompiledTokenizer


async def load_embedding_model(spec: TextModelSpec, context: LoadContext) -> EmbeddingModel:
    """Load a model of embeddings; the caller owns it and closes it.

    Raises:
        ConfigError: files are missing, or are not what they must be.
        NotReady: the model could not be tried.

    Cancellation: at once; the load goes on in its thread and its result is dropped.
    """
    started = perf_counter()
    parts = await _load(spec, partial(compile_embedder, pooling=spec.pooling, normalize=spec.normalize))
    hooks = context.meters.servable(spec.name, _VERSION)
    texts = _texts(spec, parts)
    service = EmbeddingModel(spec.name, texts, await _serve_rows(spec, parts, hooks, context))
    hooks.set_load_seconds(perf_counter() - started)
    return service


async def load_rerank_model(spec: TextModelSpec, context: LoadContext) -> RerankModel:
    """Load a model that scores documents by a query; the caller owns it and closes it.

    Raises:
        ConfigError: files are missing, or are not what they must be.
        NotReady: the model could not be tried.

    Cancellation: at once; the load goes on in its thread and its result is dropped.
    """
    started = perf_counter()
    parts = await _load(spec, compile_scorer)
    pair = parts.tokenizer.special_tokens.pair
    if pair is None:
        message = "the tokenizer does not say how a query and a document are put together"
        raise ConfigError([Problem(message, file=str(parts.folder.tokenizer))])
    hooks = context.meters.servable(spec.name, _VERSION)
    texts = _texts(spec, parts)
    rows = await _serve_rows(spec, parts, hooks, context)
    service = RerankModel(spec.name, texts, rows, pair, spec.max_allowed_chunks)
    hooks.set_load_seconds(perf_counter() - started)
    return service


async def _load(spec: TextModelSpec, compile_rows: Callable[[ModelFile], Compiled]) -> _Parts:
    folder = await run_load(partial(read_text_folder, spec.path))
    model = ModelSpec(
        name=spec.name,
        base_path=spec.path,
        origin=spec.origin,
        target_device=spec.device,
        plugin_config=_properties(spec.plugin_config),
        cache_dir=spec.cache_dir,
    )
    source = ModelFile(folder.model, model)
    await try_model(trial_of(source, spec.path))
    tokenizer = await run_load(partial(compile_tokenizer, folder.tokenizer, spec.name))
    return _Parts(folder, await run_load(partial(compile_rows, source)), tokenizer)


def _texts(spec: TextModelSpec, parts: _Parts) -> RowTexts:
    tokenizer = parts.tokenizer
    tokens = TextTokens(Network(tokenizer.compiled, fills_cores=False), tokenizer.special_tokens, tokenizer.pad_id)
    return RowTexts(tokens, parts.folder, truncate=spec.truncate)


async def _serve_rows(spec: TextModelSpec, parts: _Parts, hooks: ServableHooks, context: LoadContext) -> RowEncoder:
    network = Network(parts.compiled, hooks)
    rows = RowEncoder(network, parts.tokenizer.pad_id, spec.max_queue, hooks)
    await context.tasks.start(rows.serve)
    return rows


def _properties(config: Mapping[str, Any]) -> dict[str, str]:
    """Write properties as OpenVINO reads them."""
    return {
        name: ("YES" if value else "NO") if isinstance(value, bool) else str(value) for name, value in config.items()
    }
