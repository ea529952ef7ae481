"""Loading of language models: model folders, GGUF conversion, engine options, and the service."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from platformdirs import user_cache_path

from ovmstrio.config.specs import PROMPT_LOOKUP
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.engine.gguf import GgufError, read_header
from ovmstrio.inference.engine.messages import ADAPTER_FILE, CONTEXT_FILE, LANGUAGE_MODEL_FILE, LOADED
from ovmstrio.isolation.worker_process import WorkerExited, WorkerProcess
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.text.engine_client import EngineClient
from ovmstrio.text.engine_process import EngineProcess, sleep_when_idle
from ovmstrio.text.engine_sharing import create_engine, request_ids
from ovmstrio.text.media import MediaLoader
from ovmstrio.text.model_swap import ModelSwap, ServingModels, weight_bytes
from ovmstrio.text.text_metrics import TextMetrics
from ovmstrio.text.text_model import TextModel
from ovmstrio.util.container_limits import free_memory
from ovmstrio.util.load_limit import run_load
from ovmstrio.util.regular_files import open_regular

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.serving.kind import LoadContext

log = structlog.get_logger(__name__)

_SUFFIX: Final = ".gguf"
_FILES: Final = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
_IMAGE_MODEL_FILES: Final = (LANGUAGE_MODEL_FILE, "openvino_text_embeddings_model.xml", *_FILES[1:])
"""Files of a model that takes images, apart from its vision encoder, whose files differ."""
_OTHER_MODEL_FILES: Final = {
    "model_index.json": ("an image model cannot generate text", "set the task to image_generation"),
    "openvino_encoder_model.xml": (
        "a speech model cannot generate text",
        "set the task to speech2text or text2speech",
    ),
}
"""Files of other kinds of models, each with an error message and a hint."""
_DRAFTING: Final = "draft_models_path and prompt_lookup"
_CONVERSION: Final = "ovmstrio.inference.engine.gguf_conversion"
_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""GGUF architectures that openvino-genai reads."""


async def model_folder(spec: TextModelSpec) -> Path:
    """Return the folder of a model, converting a GGUF file if needed.

    Raises:
        ConfigError: there is no model, or it cannot be read.
    """
    source, missing = await run_load(lambda: _find(spec.path.absolute()))
    if missing:
        message, hint = await run_load(lambda: _describe_folder(source))
        files = await run_load(lambda: _needed_files(source))
        problem = Problem(
            message,
            path="path",
            expected=f"a folder with {', '.join(files)}, or a {_SUFFIX} file",
            found=missing,
            suggestion=hint,
        )
        raise ConfigError([spec.placed(problem)])
    if source.suffix != _SUFFIX:
        return source
    if spec.adapter is not None:
        problem = Problem(
            "LoRA adapters fit no model converted from GGUF, which has no names of layers",
            path="lora_adapters",
            expected="a folder converted from the adapter's base model",
            found=str(source),
        )
        raise ConfigError([spec.placed(problem)])
    try:
        return await _converted_folder(spec, source)
    except OSError as error:
        message = f"the model cannot be converted: {error.strerror or error}"
        raise ConfigError([spec.placed(Problem(message, path="path", found=str(source)))]) from error


def _find(path: Path) -> tuple[Path, str]:
    """Return the model's folder or GGUF file, and what is missing; blocking."""
    if path.is_file():
        return path, "" if path.suffix == _SUFFIX else str(path)
    absent = [name for name in _needed_files(path) if not (path / name).is_file()]
    if not absent:
        return path, ""
    files = sorted(path.glob(f"*{_SUFFIX}"))
    if len(files) == 1:
        return files[0], ""
    return path, f"{path} without {', '.join(absent)}" if path.is_dir() else f"{path}, which does not exist"


def _needed_files(path: Path) -> tuple[str, ...]:
    return _IMAGE_MODEL_FILES if (path / LANGUAGE_MODEL_FILE).is_file() else _FILES


def _describe_folder(path: Path) -> tuple[str, str]:
    """Return an error message and a hint for a folder without a language model; blocking."""
    found = (words for file, words in _OTHER_MODEL_FILES.items() if (path / file).is_file())
    return next(found, ("no model that openvino-genai can load", ""))


async def _converted_folder(spec: TextModelSpec, source: Path) -> Path:
    """Return the folder of a converted GGUF file, converting it once.

    Raises:
        ConfigError: the file cannot be read.
    """
    context = await run_load(lambda: _context_of(spec, source))
    key = await run_load(lambda: _hash_of(source))
    folder = (spec.cache_dir or user_cache_path("ovmstrio")) / "text_models" / key
    if await run_load(folder.is_dir):
        return folder
    log.info("GGUF conversion started", model=spec.name, file=str(source), folder=str(folder))
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
    """Return the context length of a GGUF file; blocking.

    Raises:
        ConfigError: the file is invalid or has an unsupported architecture.
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
    """Fill a folder in a subprocess, which frees its memory at the end; return an error text, or an empty string."""
    async with trio.open_nursery() as nursery:
        process = WorkerProcess(_CONVERSION, kills_group=True, log_fields={"model": name})
        try:
            kind, payload = await process.start(nursery, [str(source), str(folder)])
        except WorkerExited as ended:
            return f"the conversion process {ended.why}"
        nursery.cancel_scope.cancel()
    return "" if kind == LOADED else str(payload)


def _finish(made: Path, folder: Path, context: int | None) -> None:
    if context is not None:
        settings: dict[str, Any] = {"context_length": context}
        (made / CONTEXT_FILE).write_text(json.dumps(settings))
    try:
        made.rename(folder)
    except OSError:
        # Another process may have finished the same conversion.
        if not folder.is_dir():
            raise


_GIB: Final = 2**30
_FREE_MEMORY_DIVISOR: Final = 4
_MIN_CACHE_BYTES: Final = 2**26
_AUTO: Final = "auto"
_RETIRE_FIRST: Final = "retire_first"


async def load_text_model(spec: TextModelSpec, context: LoadContext) -> TextModel:
    """Load a language model, which the caller must close.

    Raises:
        ConfigError: there is no such model.
        ModelFailure: it cannot be loaded.
    """
    running: ServingModels[TextModel] = context.shared(ServingModels)
    return await host_service(context.tasks, _open(spec, context, running), kind=spec.kind, name=spec.name)


@asynccontextmanager
async def _open(
    spec: TextModelSpec, context: LoadContext, running: ServingModels[TextModel]
) -> AsyncIterator[TextModel]:
    folder = await model_folder(spec)
    if spec.adapter is not None:
        await run_load(partial(_check_adapter, spec, spec.adapter.path))
    draft = None
    if spec.draft_path is not None:
        # The draft models of EAGLE-3 have no tokenizer.
        has_model = await run_load((spec.draft_path / _FILES[0]).is_file)
        draft_spec = spec.model_copy(update={"path": spec.draft_path, "adapter": None})
        draft = spec.draft_path.absolute() if has_model else await model_folder(draft_spec)
    if (draft is not None or spec.looks_up) and await run_load((folder / LANGUAGE_MODEL_FILE).is_file):
        problem = Problem("a model that takes images cannot draft tokens", suggestion=f"remove {_DRAFTING}")
        raise ConfigError([spec.placed(problem)])
    options = _options(spec, folder, draft)
    metrics = TextMetrics(spec.name)
    link = EngineClient(metrics, request_ids(context.engines), spec.max_queue_time)
    process = create_engine(
        context.engines, spec, options, link.hear, link.lose, failed=link.fail_all, on_drained=link.deliver
    )
    is_own = isinstance(process, EngineProcess)
    if is_own:
        metrics.cache_bytes.set(options["pipeline"]["cache_bytes"])
    swap: ModelSwap[TextModel] = ModelSwap(process, spec.name)
    media = MediaLoader(context.media)
    old = running.get(spec.name)
    with context.meters.collecting((metrics,), ""):
        async with trio.open_nursery() as nursery:
            if old is not None and is_own and await _must_retire_first(spec, options, folder, draft):
                async with old.unloading_for_successor():
                    await nursery.start(process.run)
                    model = old.successor = TextModel(spec, process, link, swap, media)
            else:
                await nursery.start(process.run)
                model = TextModel(spec, process, link, swap, media)
            model.report_detections(context)
            running.begins(spec.name, swap)
            if spec.idle_unload_seconds and isinstance(process, EngineProcess):
                nursery.start_soon(sleep_when_idle, process, link, spec)
            try:
                yield model
            finally:
                running.ends(spec.name, swap)
                if old is not None and old.successor is model:
                    # The old model serves again if its replacement never did.
                    old.successor = swap.successor
                await process.sleep()
                nursery.cancel_scope.cancel()


def _check_adapter(spec: TextModelSpec, path: Path) -> None:
    """Check that an adapter is a folder in peft's format or a ``.safetensors`` file; blocking."""
    file = path / ADAPTER_FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".safetensors":
        expected = f"a folder with {ADAPTER_FILE}, or a .safetensors file"
        problem = Problem("no LoRA adapter", path="lora_adapters", expected=expected, found=str(path))
        raise ConfigError([spec.placed(problem)])


async def _must_retire_first(spec: TextModelSpec, options: dict[str, Any], folder: Path, draft: Path | None) -> bool:
    """Return True if the old model must be unloaded before this one is loaded."""
    if spec.reload != _AUTO:
        return spec.reload == _RETIRE_FIRST
    weights = await run_load(lambda: weight_bytes(folder, draft))
    # An automatic cache size always fits, because it is a part of the free memory.
    cache = options["pipeline"]["cache_bytes"] if spec.cache_size else 0
    return weights + cache > free_memory()


def _options(spec: TextModelSpec, folder: Path, draft: Path | None) -> dict[str, Any]:
    """Return the options of the engine program."""
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
            # Rejected draft tokens would enter the prefix cache.
            "caches_prefixes": spec.enable_prefix_caching and not proposes,
            "draft_folder": "" if draft is None else str(draft),
            "draft_device": spec.draft_device,
            "draft_is_eagle3": spec.draft_eagle3_mode,
            "looks_up": spec.looks_up,
            "draft_tokens": spec.num_assistant_tokens or 0,
            "adapter": "" if spec.adapter is None else str(spec.adapter.path),
            "adapter_alpha": 1.0 if spec.adapter is None else spec.adapter.alpha,
        },
        "template_mode": spec.chat_template_mode,
        "max_model_len": spec.max_model_len,
        "limits": {
            "answer": spec.max_tokens_limit,
            "texts": spec.max_num_seqs,
            "waiting": spec.max_queue,
            "queue_seconds": spec.max_queue_time,
            "overcommit": spec.kv_overcommit,
        },
    }


def _cache_bytes(spec: TextModelSpec) -> int:
    if spec.cache_size:
        return max(1, round(spec.cache_size * _GIB))
    chosen = max(_MIN_CACHE_BYTES, free_memory() // _FREE_MEMORY_DIVISOR)
    chosen -= chosen % (_GIB if chosen > _GIB else _MIN_CACHE_BYTES)
    log.info("KV cache size chosen", model=spec.name, gigabytes=chosen / _GIB)
    return chosen
