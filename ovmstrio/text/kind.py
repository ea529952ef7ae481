"""Models that make text, vectors or scores, as the server knows them."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.config.text_entries import TEXT_MODELS, read_text_models
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.service import NOTHING_INSIDE, Inside
from ovmstrio.serving.fingerprints import tree_mark
from ovmstrio.serving.kind import Kind, Takes
from ovmstrio.serving.model_versions import ONLY_VERSION, Listing, check_regular_files
from ovmstrio.util.placement import run_load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.core.generation import GenerativeService
    from ovmstrio.core.service import Service
    from ovmstrio.serving.kind import LoadContext

__all__ = ["LOADERS", "TextModelKind", "load_task"]

# ----------------------------------------------------------------------
# Models that make text, vectors or scores, as the server knows them
# ----------------------------------------------------------------------


class TextModelKind(Kind[TextModelSpec]):
    """Folders of openvino-genai and files of GGUF, whatever their task."""

    name = TextModelSpec.kind
    spec = TextModelSpec
    takes = frozenset({Takes.GENERATION})
    runs_user_code = False
    fills_cores = True
    section = TEXT_MODELS
    occupied = "Text model has a name that is taken"

    def read(self, file: ConfigFile) -> list[TextModelSpec]:
        """Read the models of the file."""
        return read_text_models(file)

    def list_versions(self, spec: TextModelSpec) -> Listing:
        """Give the one version there is."""
        return Listing({ONLY_VERSION: spec.path}, mark=self.files_mark(spec, spec.path))

    def files_mark(self, spec: TextModelSpec, directory: Path) -> str:
        """Look at the files of the model."""
        del directory
        drafts = "" if spec.draft_path is None else tree_mark(spec.draft_path)
        return tree_mark(spec.path) + drafts

    async def load(self, spec: TextModelSpec, version: int, directory: Path, context: LoadContext) -> Service:
        """Load it by its task."""
        del version, directory
        return await load_task(spec, context)

    def obstacle(self, service: Service) -> str:
        """Tell of a process that has ended, and is not there again yet."""
        told: str = getattr(service, "obstacle", "")
        return told

    def look_inside(self, spec: TextModelSpec, service: Service) -> Inside:
        """Tell of the batch and the cache of what makes text."""
        from ovmstrio.text.text_model import TextModel  # noqa: PLC0415 - for who loads only

        del spec
        return Inside(facts=service.facts) if isinstance(service, TextModel) else NOTHING_INSIDE


# ----------------------------------------------------------------------
# Which module loads the services of which task; each is left alone by those who have none of its services
# ----------------------------------------------------------------------

LOADERS: Final[Mapping[Task, str]] = {
    Task.TEXT_GENERATION: "ovmstrio.text.load_text_model:load_text_model",
    Task.EMBEDDINGS: "ovmstrio.text.embedding:load_embedding_model",
    Task.SPEECH_TO_TEXT: "ovmstrio.text.transcription:load_transcription_model",
    Task.TEXT_TO_SPEECH: "ovmstrio.text.speech:load_speech_model",
    Task.RERANK: "ovmstrio.text.embedding:load_rerank_model",
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
