"""Which module loads the services of which task; each is left alone by those who have none of its services."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.repository.versions import check_regular_files
from ovmstrio.work.placement import run_load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.text_models import TextModelSpec
    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.runtimes.kind import LoadContext

__all__ = ["LOADERS", "load_task"]

LOADERS: Final[Mapping[Task, str]] = {
    Task.TEXT_GENERATION: "ovmstrio.runtimes.generation.load_text_model:load_text_model",
    Task.EMBEDDINGS: "ovmstrio.runtimes.generation.embedding.loading:load_embedding_model",
    Task.SPEECH_TO_TEXT: "ovmstrio.runtimes.generation.speech.transcription_model:load_transcription_model",
    Task.TEXT_TO_SPEECH: "ovmstrio.runtimes.generation.speech.speech_model:load_speech_model",
    Task.RERANK: "ovmstrio.runtimes.generation.embedding.loading:load_rerank_model",
}
"""The function for each task, ``module:name``; called as ``await name(spec, context)``, it gives the service."""


async def load_task(spec: TextModelSpec, context: LoadContext) -> GenerativeService:
    """Make the service of a model; the caller owns it and closes it.

    Raises:
        ConfigError: the settings cannot be used, or nothing here does that task.
        ServerError: it cannot be loaded.

    Cancellation: at any checkpoint; nothing is left.
    """
    if spec.errors:
        raise ConfigError(spec.errors)
    if spec.task not in LOADERS:
        expected = ", ".join(sorted(task.value for task in LOADERS)) or "no task"
        problem = Problem("the task is not served here", path="task", expected=expected, found=spec.task.value)
        raise ConfigError([spec.placed(problem)])
    for path in (spec.path, spec.draft_path):
        if path is not None:
            await run_load(partial(check_regular_files, path))
    module, _, name = LOADERS[spec.task].partition(":")
    load: Any = getattr(import_module(module), name)
    service: GenerativeService = await load(spec, context)
    return service
