"""The options of a model of text, whichever of ``config.json``, the command line and a graph file they were written in.

::

    option name -> value as written ── read_text_options ──> fields of TextModelSpec, problems
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from ovmstrio.config.documents import expected_by
from ovmstrio.config.findings import did_you_mean, shown, wrong
from ovmstrio.config.shapes import object_in_text
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task

__all__ = ["TASKS", "TEXT_OPTIONS", "read_task", "read_text_options"]

TASKS: Final = tuple(task.value for task in Task)
_GENERATION: Final = frozenset({Task.TEXT_GENERATION})
_EMBEDDINGS: Final = frozenset({Task.EMBEDDINGS})
_TRANSCRIPTION: Final = frozenset({Task.SPEECH_TO_TEXT})
_SPEECH: Final = frozenset({Task.TEXT_TO_SPEECH})
_EVERY: Final = frozenset(Task)
_SPEEDS: Final = ("speed_min", "speed_max")
_DRAFT_PATH: Final = "draft_models_path"
_KV_CACHE_PRECISION: Final = "KV_CACHE_PRECISION"
_SERVED_PIPELINES: Final = ("AUTO", "LM_CB", "LM")
_IMAGES: Final = "models that take images or sound beside text are not served by this version"
_DRAFT: Final = "the model that drafts has the settings of the first by this version"


class _Option(NamedTuple):
    field: str
    tasks: frozenset[Task]


_OPTIONS: Final[Mapping[str, _Option]] = {
    "target_device": _Option("device", _EVERY),
    "plugin_config": _Option("plugin_config", _EVERY),
    "idle_unload_seconds": _Option("idle_unload_seconds", _GENERATION | _TRANSCRIPTION | _SPEECH),
    "kv_cache_precision": _Option("plugin_config", _GENERATION),
    "pipeline_type": _Option("", _GENERATION),
    **{
        name: _Option(name, _GENERATION)
        for name in (
            "max_num_batched_tokens",
            "cache_size",
            "max_num_seqs",
            "dynamic_split_fuse",
            "enable_prefix_caching",
            "best_of_limit",
            "max_tokens_limit",
            "tool_parser",
            "reasoning_parser",
            "enable_tool_guided_generation",
            "chat_template_mode",
            "kv_overcommit",
            "reload",
        )
    },
    "draft_models_path": _Option("draft_path", _GENERATION),
    "draft_device": _Option("draft_device", _GENERATION),
    "pooling": _Option("pooling", _EMBEDDINGS),
    "normalize": _Option("normalize", _EMBEDDINGS),
    "truncate": _Option("truncate", _EMBEDDINGS),
    "max_allowed_chunks": _Option("max_allowed_chunks", frozenset({Task.RERANK})),
    "enable_word_timestamps": _Option("enable_word_timestamps", _TRANSCRIPTION),
    "voices": _Option("voices", _SPEECH),
    **{name: _Option(name, _SPEECH) for name in _SPEEDS},
}

TEXT_OPTIONS: Final = frozenset(_OPTIONS)
"""The options of models of text, by OVMS's names where it has them."""

_NOT_SERVED: Final = {
    **dict.fromkeys(
        (
            "draft_max_num_batched_tokens",
            "draft_cache_size",
            "draft_block_size",
            "draft_max_num_seqs",
            "draft_dynamic_split_fuse",
        ),
        (_DRAFT, "remove it"),
    ),
    "draft_eagle3_mode": ("models that draft by EAGLE-3 are not served by this version", "remove it"),
    "cache_eviction_config": ("tokens are not evicted from the cache by this version", "remove it"),
    "sparse_attention_config": ("attention is not thinned out by this version", "remove it"),
    "cache_interval_multiplier": ("it is not served by this version", "remove it"),
    "generation_config_path": (
        "defaults of sampling come from the model's own folder",
        "remove it, and put the file into that folder as generation_config.json",
    ),
    "max_position_embeddings": ("the model says itself how many tokens it takes", "remove it"),
    "max_length": ("the model says itself how many tokens it takes", "remove it"),
}
"""Options of OVMS that are known and not served: why, and what to do."""


def read_task(value: Any) -> Task:
    """Read the option ``task``.

    Raises:
        ConfigError: there is no such task.
    """
    if value in TASKS:
        return Task(value)
    raise wrong("task", value, " or ".join(TASKS), suggestion=did_you_mean(str(value), TASKS))


def read_text_options(task: Task, options: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Read the options of a model; those that cannot be read are left out.

    Args:
        task: what the model does.
        options: what the user wrote; names that no model of text has are passed over.
        directory: what paths are relative to.

    Returns:
        Fields of ``TextModelSpec``, and the problems, whose ``path`` is the option.  The model is to be served if there
        are none.
    """
    fields: dict[str, Any] = {}
    problems: list[Problem] = []
    for option, value in options.items():
        if option in _NOT_SERVED:
            problems += _refused(option, value)
        elif option in _OPTIONS and task not in _OPTIONS[option].tasks:
            problems.append(_misplaced(option, task))
        elif option in _OPTIONS:
            try:
                _read(option, value, fields, directory)
            except ConfigError as error:
                problems += error.problems
    return fields, [*problems, *_out_of_bounds(fields, options), *_empty_range(fields)]


def _empty_range(fields: dict[str, Any]) -> list[Problem]:
    """See that there is a speed between the slowest and the fastest one."""
    bounds = [fields.get(name, TextModelSpec.model_fields[name].default) for name in _SPEEDS]
    if bounds[0] <= bounds[1]:
        return []
    message = f"speed_min ({bounds[0]:g}) must be <= speed_max ({bounds[1]:g})"
    return [Problem(message, path=next(name for name in _SPEEDS if name in fields))]


def _refused(option: str, value: Any) -> list[Problem]:
    if value is False:  # what is switched off is not asked for
        return []
    message, way_out = _NOT_SERVED[option]
    return [Problem(message, path=option, suggestion=way_out)]


def _misplaced(option: str, task: Task) -> Problem:
    whose = ", ".join(sorted(each.value for each in _OPTIONS[option].tasks))
    message = f"is an option of models for {whose}, and the task of this one is {task.value}"
    return Problem(message, path=option, suggestion="leave it out")


def _read(option: str, value: Any, fields: dict[str, Any], directory: Path) -> None:
    field = _OPTIONS[option].field
    if option == "plugin_config":
        fields[field] = {**_plugin_config(value), **fields.get(field, {})}
    elif option == "kv_cache_precision":
        fields[field] = {**fields.get(field, {}), _KV_CACHE_PRECISION: value}
    elif option == "pipeline_type":
        _check_pipeline(value)
    elif option == _DRAFT_PATH:
        fields[field] = directory / value
    elif option == "voices":
        fields[field] = _voices(value, directory)
    else:
        fields[field] = value


def _plugin_config(value: Any) -> dict[str, Any]:
    settings = object_in_text("plugin_config", value) if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise wrong("plugin_config", value, 'an object such as {"KV_CACHE_PRECISION": "u8"}')
    for key, setting in settings.items():
        if not isinstance(setting, str | int | float):
            raise wrong(f"plugin_config.{key}", setting, "a text, a number, true or false")
    return dict(settings)


def _voices(value: Any, directory: Path) -> dict[str, Path]:
    """Read files by names, of an object, or of a list of objects with both, as in graphs; the last of a name counts."""
    if isinstance(value, Mapping):
        value = [{"name": name, "path": path} for name, path in value.items()]
    expected = 'an object such as {"anna": "voices/anna.bin"}'
    if not isinstance(value, list):
        raise wrong("voices", value, expected)
    voices = {}
    for each in value:
        name, path = (each.get("name"), each.get("path")) if isinstance(each, Mapping) else (None, None)
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise wrong("voices", each, expected)
        voices[name] = directory / path
    return voices


def _check_pipeline(value: Any) -> None:
    expected = ", ".join(_SERVED_PIPELINES)
    if value in {"VLM", "VLM_CB", "OMNI"}:
        raise wrong("pipeline_type", value, expected, message=_IMAGES, suggestion="leave it out, for a model of text")
    if value not in _SERVED_PIPELINES:
        raise wrong("pipeline_type", value, expected, suggestion=did_you_mean(str(value), _SERVED_PIPELINES))


def _out_of_bounds(fields: dict[str, Any], options: Mapping[str, Any]) -> list[Problem]:
    """Tell which values the spec does not take, and take them out."""
    try:
        TextModelSpec.model_validate({"name": "", "base_path": Path(), "path": Path(), **fields}, strict=True)
    except ValidationError as error:
        bad = {str(fault["loc"][0]): fault for fault in error.errors(include_url=False)}
    else:
        return []
    problems = []
    for field, fault in bad.items():
        option = next(name for name, each in _OPTIONS.items() if each.field == field and name in options)
        suggestion = ""
        if fault["type"] == "literal_error" and isinstance(fault["input"], str):
            suggestion = f"did you mean {fault['input'].upper()!r}?" if fault["input"].upper() in fault["msg"] else ""
        message, expected = "the value cannot be used", expected_by(fault)
        problems.append(
            Problem(message, path=option, expected=expected, found=shown(fault["input"]), suggestion=suggestion)
        )
        del fields[field]
    return problems
