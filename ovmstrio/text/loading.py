"""Loading of text models by task."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.serving.model_versions import check_regular_files
from ovmstrio.util.load_limit import run_load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.serving.kind import LoadContext

LOADERS: Final[Mapping[Task, str]] = {
    Task.TEXT_GENERATION: "ovmstrio.text.load_text_model:load_text_model",
    Task.EMBEDDINGS: "ovmstrio.text.embedding:load_embedding_model",
    Task.SPEECH_TO_TEXT: "ovmstrio.text.transcription:load_transcription_model",
    Task.TEXT_TO_SPEECH: "ovmstrio.text.speech:load_speech_model",
    Task.RERANK: "ovmstrio.text.embedding:load_rerank_model",
}
"""Loader function of each task as ``module:name``; each is imported only when needed."""


async def load_task(spec: TextModelSpec, context: LoadContext) -> GenerativeService:
    """Load the service of a model, which the caller must close.

    Raises:
        ConfigError: the settings are invalid, or the task is not supported.
        ServerError: loading failed.
    """
    if spec.errors:
        raise ConfigError(spec.errors)
    if spec.task not in LOADERS:
        expected = ", ".join(sorted(task.value for task in LOADERS)) or "no task"
        problem = Problem("the task is not supported", path="task", expected=expected, found=spec.task.value)
        raise ConfigError([spec.placed(problem)])
    for path in (spec.path, spec.draft_path):
        if path is not None:
            await run_load(partial(check_regular_files, path))
    module, _, name = LOADERS[spec.task].partition(":")
    load: Any = getattr(import_module(module), name)
    service: GenerativeService = await load(spec, context)
    return service
