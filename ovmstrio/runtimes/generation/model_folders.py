"""Folders that engines load: those of openvino-genai as they are, and those that are made of GGUF files, once.

::

    model.gguf ─> its hash ─> <cache>/text_models/<hash> if that is there, else written beside it and renamed
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio
from platformdirs import user_cache_path

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.engine.frames import CONTEXT_FILE, LOADED
from ovmstrio.openvino.engine.gguf_header import GgufError, read_header
from ovmstrio.util.regular_files import open_regular
from ovmstrio.work.placement import run_load
from ovmstrio.work.processes import WorkerEnded, WorkerProcess

if TYPE_CHECKING:
    from ovmstrio.config.text_models import TextModelSpec

__all__ = ["model_folder"]

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
_CONVERSION: Final = "ovmstrio.openvino.engine.gguf_conversion"
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
