"""Models that make text: from their settings to a service whose engine has loaded them."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.config.text_models import PROMPT_LOOKUP
from ovmstrio.runtimes.generation.engine_link import EngineLink
from ovmstrio.runtimes.generation.engine_process import EngineProcess
from ovmstrio.runtimes.generation.idle_unload import sleep_when_idle
from ovmstrio.runtimes.generation.model_folders import model_folder
from ovmstrio.runtimes.generation.replacing import Handover, RunningModels, bytes_of_weights
from ovmstrio.runtimes.generation.sharing.asking import numbers_of
from ovmstrio.runtimes.generation.sharing.choosing_engine import engine_of
from ovmstrio.runtimes.generation.text_metrics import TextMetrics
from ovmstrio.runtimes.generation.text_model import TextModel
from ovmstrio.runtimes.resident import host
from ovmstrio.work.placement import run_load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["load_text_model"]

log = structlog.get_logger(__name__)

_GIB: Final = 2**30
_PART_OF_FREE: Final = 4
_LEAST_CACHE: Final = 2**26
_AUTO: Final = "auto"
_RETIRE_FIRST: Final = "retire_first"


async def load_text_model(spec: TextModelSpec, context: LoadContext) -> TextModel:
    """Load a model; the caller owns the service and closes it.

    Raises:
        ConfigError: there is no such model.
        ModelFailure: it cannot be loaded.

    Cancellation: at any checkpoint; nothing is left.
    """
    running: RunningModels[TextModel] = context.shared(RunningModels)
    return await host(context.tasks, _open(spec, context, running), kind=spec.kind, name=spec.name)


@asynccontextmanager
async def _open(
    spec: TextModelSpec, context: LoadContext, running: RunningModels[TextModel]
) -> AsyncIterator[TextModel]:
    """Have a model loaded while the block lasts.

    Raises:
        ConfigError, ModelFailure: as :func:`load_text_model`.

    Ownership: the engine's process.
    """
    folder = await model_folder(spec)
    draft = None if spec.draft_path is None else await model_folder(spec.model_copy(update={"path": spec.draft_path}))
    options = _options(spec, folder, draft)
    metrics = TextMetrics(spec.name)
    link = EngineLink(metrics, numbers_of(context.engines))
    process = engine_of(context.engines, spec, options, link.hear, link.lose, failed=link.fail_all)
    is_own = isinstance(process, EngineProcess)
    if is_own:
        metrics.cache_bytes.set(options["pipeline"]["cache_bytes"])
    handover: Handover[TextModel] = Handover(process, spec.name)
    old = running.get(spec.name)
    with context.meters.collecting((metrics,), ""):
        async with trio.open_nursery() as nursery:
            if old is not None and is_own and await _needs_room(spec, options, folder, draft):
                async with old.giving_way():
                    await nursery.start(process.run)
                    model = old.successor = TextModel(spec, process, link, handover)
            else:
                await nursery.start(process.run)
                model = TextModel(spec, process, link, handover)
            running.begins(spec.name, handover)
            if spec.idle_unload_seconds and is_own:
                nursery.start_soon(sleep_when_idle, process, link, spec)
            try:
                yield model
            finally:
                running.ends(spec.name, handover)
                if old is not None and old.successor is model:
                    # It answers itself again where what has replaced it did not come to serve.
                    old.successor = handover.successor
                await process.sleep()
                nursery.cancel_scope.cancel()


async def _needs_room(spec: TextModelSpec, options: dict[str, Any], folder: Path, draft: Path | None) -> bool:
    """Tell whether the model that is replaced has to go before this one is loaded."""
    if spec.reload != _AUTO:
        return spec.reload == _RETIRE_FIRST
    weights = await run_load(lambda: bytes_of_weights(folder, draft))
    # What is chosen by the memory that is free fits into it.
    cache = options["pipeline"]["cache_bytes"] if spec.cache_size else 0
    return weights + cache > _free_memory()


def _options(spec: TextModelSpec, folder: Path, draft: Path | None) -> dict[str, Any]:
    """Give what the engine's program is told first."""
    proposes = draft is not None or spec.looks_up
    properties = {name: value for name, value in spec.plugin_config.items() if name != PROMPT_LOOKUP}
    return {
        "pipeline": {
            "folder": str(folder),
            "device": spec.device,
            "properties": properties,
            "cache_bytes": _cache_bytes(spec),
            "batched_tokens": spec.max_num_batched_tokens,
            "texts": spec.max_num_seqs,
            "splits_prompts": spec.dynamic_split_fuse,
            # Tokens that were proposed and not chosen would be among the prefixes.
            "caches_prefixes": spec.enable_prefix_caching and not proposes,
            "draft_folder": "" if draft is None else str(draft),
            "draft_device": spec.draft_device,
            "looks_up": spec.looks_up,
        },
        "template_mode": spec.chat_template_mode,
        "limits": {
            "answer": spec.max_tokens_limit,
            "texts": spec.max_num_seqs,
            "waiting": spec.max_queue,
            "overcommit": spec.kv_overcommit,
        },
    }


def _cache_bytes(spec: TextModelSpec) -> int:
    if spec.cache_size:
        return max(1, round(spec.cache_size * _GIB))
    chosen = max(_LEAST_CACHE, _free_memory() // _PART_OF_FREE)
    chosen -= chosen % (_GIB if chosen > _GIB else _LEAST_CACHE)
    log.info("cache of keys and values: a quarter of the free memory", model=spec.name, gigabytes=chosen / _GIB)
    return chosen


def _free_memory() -> int:
    """Tell how much memory could be had without anything being written to disk, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
