"""The service kind of text models, and the loader of each task."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.config.text_entries import TEXT_MODELS, find_task, read_text_models
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.service import OPTION, Detection, Introspection
from ovmstrio.serving.fingerprints import tree_fingerprint
from ovmstrio.serving.kind import CallType, Kind
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing, check_regular_files
from ovmstrio.util.load_limit import run_load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.service import Service
    from ovmstrio.serving.kind import LoadContext


class TextModelKind(Kind[TextModelSpec]):
    """Folders of openvino-genai models and GGUF files, for any task."""

    name = TextModelSpec.kind
    spec = TextModelSpec
    call_types = frozenset({CallType.GENERATION})
    runs_user_code = False
    fills_cores = True
    section = TEXT_MODELS
    occupied = "Text model has a name that is taken"

    def read(self, file: ConfigFile) -> list[TextModelSpec]:
        """Read the text models of a configuration file."""
        return read_text_models(file)

    def list_versions(self, spec: TextModelSpec) -> Listing:
        """Return the only version."""
        return Listing({ONLY_VERSION: spec.path}, fingerprint=self.fingerprint(spec, spec.path))

    def fingerprint(self, spec: TextModelSpec, directory: Path) -> str:
        """Return the fingerprint of the files of the model, its draft model and its adapter."""
        del directory
        return "".join(tree_fingerprint(path) for path in _paths(spec))

    async def load(self, spec: TextModelSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Load a model by its task."""
        del version, directory
        return await load_task(spec, context)

    def unready_reason(self, service: Service) -> str:
        """Return why the engine is unavailable."""
        reason: str = getattr(service, "unready_reason", "")
        return reason

    def look_inside(self, spec: TextModelSpec, service: Service) -> Introspection:
        """Return the state of a language model's batch and cache, or the progress of an image model."""
        del spec
        return Introspection(facts=getattr(service, "facts", {}))


def _paths(spec: TextModelSpec) -> list[Path]:
    further = spec.draft_path, None if spec.adapter is None else spec.adapter.path
    return [spec.path, *(path for path in further if path is not None)]


LOADERS: Final[Mapping[Task, str]] = {
    Task.TEXT_GENERATION: "ovmstrio.text.load_text_model:load_text_model",
    Task.EMBEDDINGS: "ovmstrio.text.embedding:load_embedding_model",
    Task.SPEECH_TO_TEXT: "ovmstrio.text.transcription:load_transcription_model",
    Task.TEXT_TO_SPEECH: "ovmstrio.text.speech:load_speech_model",
    Task.RERANK: "ovmstrio.text.embedding:load_rerank_model",
    Task.IMAGE_GENERATION: "ovmstrio.text.image_generation:load_image_model",
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
    for path in _paths(spec):
        await run_load(partial(check_regular_files, path))
    task, file = await run_load(partial(find_task, spec.path))
    context.detect(Detection("task", spec.task.value, file if task is spec.task else OPTION))
    module, _, name = LOADERS[spec.task].partition(":")
    load: Any = getattr(import_module(module), name)
    if spec.max_queue_time is None:
        spec = spec.model_copy(update={"max_queue_time": context.max_queue_time})
    service: GenerativeService = await load(spec, context)
    return service
