"""Models that make text: from their settings to a service whose engine has loaded them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from platformdirs import user_cache_path

from ovmstrio.config.specs import PROMPT_LOOKUP
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.engine.gguf import GgufError, read_header
from ovmstrio.inference.engine.messages import CONTEXT_FILE, LOADED
from ovmstrio.isolation.worker_process import WorkerEnded, WorkerProcess
from ovmstrio.serving.hosted_service import host
from ovmstrio.text.engine_link import EngineLink
from ovmstrio.text.engine_process import EngineProcess, sleep_when_idle
from ovmstrio.text.engine_sharing import engine_of, numbers_of
from ovmstrio.text.model_swap import Handover, RunningModels, bytes_of_weights
from ovmstrio.text.text_metrics import TextMetrics
from ovmstrio.text.text_model import TextModel
from ovmstrio.util.placement import run_load
from ovmstrio.util.regular_files import open_regular

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.serving.kind import LoadContext

__all__ = ["load_text_model", "model_folder"]

# ----------------------------------------------------------------------
# Folders that engines load: those of openvino-genai as they are, and those that are made of GGUF files, once
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_SUFFIX: Final = ".gguf"
_FILES: Final = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
_OF_OTHERS: Final = {
    "openvino_language_model.xml": (
        "models that take images or sound beside text are not served by this version",
        "name a model of text alone",
    ),
    "model_index.json": ("models that make images are not served by this version", "name a model of text"),
    "openvino_encoder_model.xml": (
        "the model hears or speaks, and its task is to make text",
        "its task is speech2text or text2speech",
    ),
}
"""What folders are that have a file of some name, and what to do then."""
_CONVERSION: Final = "ovmstrio.inference.engine.gguf_conversion"
_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Of GGUF files that openvino-genai reads."""


async def model_folder(spec: TextModelSpec) -> Path:
    """Give the folder of a model, made of a GGUF file if it has to be.

    Raises:
        ConfigError: there is no model, or none that can be read.

    Cancellation: at any checkpoint; what was being made is removed.
    """
    source, missing = await run_load(lambda: _find(spec.path.absolute()))
    if missing:
        message, way_out = await run_load(lambda: _what_it_is(source))
        problem = Problem(
            message,
            path="path",
            expected=f"a folder with {', '.join(_FILES)}, or a {_SUFFIX} file",
            found=missing,
            suggestion=way_out,
        )
        raise ConfigError([spec.placed(problem)])
    if source.suffix != _SUFFIX:
        return source
    try:
        return await _converted(spec, source)
    except OSError as error:
        message = f"the model cannot be converted: {error.strerror or error}"
        raise ConfigError([spec.placed(Problem(message, path="path", found=str(source)))]) from error


def _find(path: Path) -> tuple[Path, str]:
    """Find the folder or file of a model, and say what is there instead; a folder may have one GGUF file; blocking."""
    if path.is_file():
        return path, "" if path.suffix == _SUFFIX else str(path)
    absent = [name for name in _FILES if not (path / name).is_file()]
    if not absent:
        return path, ""
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if len(files) == 1:
        return files[0], ""
    return path, f"{path} without {', '.join(absent)}" if path.is_dir() else f"{path}, which does not exist"


def _what_it_is(path: Path) -> tuple[str, str]:
    """Say of a folder that makes no text what it is instead, and what to do, as far as its files tell; blocking."""
    told = (words for file, words in _OF_OTHERS.items() if (path / file).is_file())
    return next(told, ("there is no model that openvino-genai could load", ""))


async def _converted(spec: TextModelSpec, source: Path) -> Path:
    """Give the folder that is made of a GGUF file.

    Raises:
        ConfigError: the file cannot be read.
        OSError: as said there.
    """
    context = await run_load(lambda: _context_of(spec, source))
    key = await run_load(lambda: _hash_of(source))
    folder = (spec.cache_dir or user_cache_path("ovmstrio")) / "text_models" / key
    if await run_load(folder.is_dir):
        return folder
    log.info("converting a GGUF file, once", model=spec.name, file=str(source), folder=str(folder))
    await run_load(lambda: folder.parent.mkdir(parents=True, exist_ok=True))
    made = Path(await run_load(lambda: tempfile.mkdtemp(prefix=f"{key[:8]}-", dir=folder.parent)))
    try:
        reason = await _convert(source, made, spec.name)
        if reason:
            found = str(source)
            raise ConfigError(
                [spec.placed(Problem(f"the GGUF file cannot be read: {reason}", path="path", found=found))]
            )
        await run_load(lambda: _finish(made, folder, context))
    finally:
        with trio.CancelScope(shield=True):
            await run_load(lambda: shutil.rmtree(made, ignore_errors=True))
    return folder


def _context_of(spec: TextModelSpec, source: Path) -> int | None:
    """Read how many tokens the model of a file takes; blocking.

    Raises:
        ConfigError: it is no such file, or of an architecture that cannot be read.
        OSError: as said there.
    """
    try:
        header = read_header(source)
    except GgufError as error:
        problem = Problem(str(error), path="path", expected="a GGUF file", found=str(source))
        raise ConfigError([spec.placed(problem)]) from error
    architecture = header.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        expected = f"one of {', '.join(_ARCHITECTURES)}; convert other models to a folder of openvino-genai's"
        message = "GGUF files of this architecture cannot be read"
        raise ConfigError([spec.placed(Problem(message, path="path", expected=expected, found=str(architecture)))])
    context = header.get(f"{architecture}.context_length")
    return context if isinstance(context, int) else None


def _hash_of(source: Path) -> str:
    with open_regular(source) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _convert(source: Path, folder: Path, name: str) -> str:
    """Have a process fill a folder; give what was wrong, nothing if that is filled.

    Ownership: the process, whose end gives back all its memory.

    Cancellation: at once; the process is killed.
    """
    async with trio.open_nursery() as nursery:
        process = WorkerProcess(_CONVERSION, ends_group=True, names={"model": name})
        try:
            kind, told = await process.start(nursery, [str(source), str(folder)])
        except WorkerEnded as ended:
            return f"the process that reads it {ended.why}"
        nursery.cancel_scope.cancel()
    return "" if kind == LOADED else str(told)


def _finish(made: Path, folder: Path, context: int | None) -> None:
    if context is not None:
        settings: dict[str, Any] = {"context_length": context}
        (made / CONTEXT_FILE).write_text(json.dumps(settings))
    try:
        made.rename(folder)
    except OSError:
        # Somebody else has made the same.
        if not folder.is_dir():
            raise


# ----------------------------------------------------------------------
# Models that make text: from their settings to a service whose engine has loaded them
# ----------------------------------------------------------------------

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
