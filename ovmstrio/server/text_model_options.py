"""A model of text that the command line describes: ``ovms serve --model_name NAME --model_path PATH --task TASK``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ovmstrio.config.graph_entries import is_graph
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.config.text_options import TEXT_OPTIONS, read_task, read_text_options
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.server.settings import ServerSettings

__all__ = ["is_text_model", "makes_text", "text_model", "text_problems"]

_GGUF: Final = ".gguf"
_FILES_OF_GENERATION: Final = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")
"""What a folder holds that makes text, and no folder of another kind."""


def is_text_model(settings: ServerSettings) -> bool:
    """Tell whether one model is served, and whether that is a model of text: by its task, else by its files."""
    if settings.model_name is None or settings.model_path is None:
        return False
    path = settings.model_path
    if settings.task is not None or path.suffix == _GGUF:
        return True
    whole = path.absolute()
    return makes_text(whole) and not is_graph({"base_path": str(whole)}, whole)


def text_problems(settings: ServerSettings, others: Collection[str]) -> list[Problem]:
    """Tell everything that is wrong with the options; ``others`` are those of models of tensors."""
    problems = [
        Problem(
            "is an option of models of tensors, and this is a model of text",
            path=f"--{name}",
            suggestion="leave it out",
        )
        for name in sorted(set(others) & settings.model_fields_set - TEXT_OPTIONS)
    ]
    return problems + _read(settings)[2]


def text_model(settings: ServerSettings, cache_dir: Path | None, origin: str) -> TextModelSpec:
    """Give the model."""
    path = (settings.model_path or Path()).absolute()
    task, fields, problems = _read(settings)
    if "max_queue" in settings.model_fields_set:
        # There is one queue then, of those that wait for room in this model's cache.
        fields["max_queue"] = settings.max_queue
    return TextModelSpec(
        name=settings.model_name or "",
        base_path=path.parent if path.suffix == _GGUF else path,
        path=path,
        task=task,
        cache_dir=cache_dir,
        origin=origin,
        problems=tuple(problems),
        **fields,
    )


def makes_text(folder: Path) -> bool:
    """Tell whether a folder holds what openvino-genai makes text of."""
    return all((folder / name).is_file() for name in _FILES_OF_GENERATION)


def _read(settings: ServerSettings) -> tuple[Task, dict[str, Any], list[Problem]]:
    try:
        task = Task.TEXT_GENERATION if settings.task is None else read_task(settings.task)
    except ConfigError as error:
        return Task.TEXT_GENERATION, {}, [_option(problem) for problem in error.problems]
    given = {name: getattr(settings, name) for name in sorted(TEXT_OPTIONS & settings.model_fields_set)}
    given = {name: value for name, value in given.items() if value is not None}
    fields, problems = read_text_options(task, given, Path.cwd())
    return task, fields, [_option(problem) for problem in problems]


def _option(problem: Problem) -> Problem:
    return replace(problem, path=f"--{problem.path}")
