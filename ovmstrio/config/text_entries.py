"""The entries of a ``text_model_config_list``: models that make text, vectors or scores of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.documents import OPTIONAL, Schema, check_members, is_whole
from ovmstrio.config.model_options import check_base_path, check_name
from ovmstrio.config.service_entries import ServiceEntry
from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.config.text_options import TEXT_OPTIONS, read_task, read_text_options
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ovmstrio.config.config_file import ConfigFile
    from ovmstrio.config.located import Located

__all__ = ["TEXT_MODELS", "read_text_models"]

TEXT_MODELS: Final = "text_model_config_list"
Object = dict[str, Any]


class _Entry(Schema):
    config: Object


class _TextModel(ServiceEntry):
    name: str
    base_path: str
    task: str = OPTIONAL
    target_device: str = OPTIONAL
    plugin_config: Object = OPTIONAL
    idle_unload_seconds: float = OPTIONAL
    pipeline_type: str = OPTIONAL
    kv_cache_precision: str = OPTIONAL
    max_num_batched_tokens: int = OPTIONAL
    cache_size: float = OPTIONAL
    max_num_seqs: int = OPTIONAL
    dynamic_split_fuse: bool = OPTIONAL
    enable_prefix_caching: bool = OPTIONAL
    best_of_limit: int = OPTIONAL
    max_tokens_limit: int = OPTIONAL
    tool_parser: str = OPTIONAL
    reasoning_parser: str = OPTIONAL
    enable_tool_guided_generation: bool = OPTIONAL
    chat_template_mode: str = OPTIONAL
    kv_overcommit: float = OPTIONAL
    reload: str = OPTIONAL
    draft_models_path: str = OPTIONAL
    draft_device: str = OPTIONAL
    pooling: str = OPTIONAL
    normalize: bool = OPTIONAL
    truncate: bool = OPTIONAL
    max_allowed_chunks: int = OPTIONAL
    enable_word_timestamps: bool = OPTIONAL
    voices: Object = OPTIONAL
    speed_min: float = OPTIONAL
    speed_max: float = OPTIONAL


def read_text_models(file: ConfigFile) -> list[TextModelSpec]:
    """Read entries in their order; of two with one name the first counts."""
    found = [_read_entry(entry, file) for entry in file.items(TEXT_MODELS)]
    return [spec for spec in found if spec is not None]


def _read_entry(entry: Located, file: ConfigFile) -> TextModelSpec | None:
    whole = check_members(entry, _Entry, file.findings)
    if "config" not in whole:
        return None
    config = whole["config"]
    members = check_members(config, _TextModel, file.findings)
    if not is_whole(config, members, _TextModel) or not file.is_first(TextModelSpec.kind, config, members["name"]):
        return None
    given = {key: member.plain() for key, member in members.items()}
    task, fields, problems = _read_settings(given, file.directory)
    path = file.directory / given["base_path"]
    place = file.place(config)
    return TextModelSpec(
        name=given["name"],
        base_path=path.parent if path.suffix == ".gguf" else path,
        path=path,
        task=task,
        cache_dir=file.cache_dir,
        origin=file.origin(config),
        problems=tuple(place.of(problem) for problem in problems),
        place=place,
        **fields,
    )


def _read_settings(given: Mapping[str, Any], directory: Path) -> tuple[Task, dict[str, Any], list[Problem]]:
    problems = [*check_name(given["name"]), *check_base_path(given["base_path"])]
    try:
        task = read_task(given.get("task", Task.TEXT_GENERATION.value))
    except ConfigError as error:
        return Task.TEXT_GENERATION, {}, [*problems, *error.problems]
    fields, wrong = read_text_options(
        task, {key: value for key, value in given.items() if key in TEXT_OPTIONS}, directory
    )
    return task, fields, problems + wrong
