"""Text models: options and the entries of ``text_model_config_list``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import create_model

from ovmstrio.config.documents import did_you_mean, invalid_value_error, to_short_json
from ovmstrio.config.model_options import plugin_settings
from ovmstrio.config.schema import OPTIONAL, Schema, check_members, keys_of, parse_value
from ovmstrio.config.service_options import ServiceEntry, check_base_path, check_name
from ovmstrio.config.shapes import parse_json_object
from ovmstrio.config.specs import PROMPT_LOOKUP, LoraAdapter, TextModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.generation import Task
from ovmstrio.core.images import parse_resolution
from ovmstrio.stores.address import local_path
from ovmstrio.util.regular_files import read_regular_text

if TYPE_CHECKING:
    from ovmstrio.config.config_file import ConfigFile, Entry

# Options

TASKS: Final = tuple(task.value for task in Task)
_GENERATION: Final = frozenset({Task.TEXT_GENERATION})
_EMBEDDINGS: Final = frozenset({Task.EMBEDDINGS})
_RERANK: Final = frozenset({Task.RERANK})
_TRANSCRIPTION: Final = frozenset({Task.SPEECH_TO_TEXT})
_SPEECH: Final = frozenset({Task.TEXT_TO_SPEECH})
_IMAGES: Final = frozenset({Task.IMAGE_GENERATION})
_ALL_TASKS: Final = frozenset(Task)
_SPEEDS: Final = ("speed_min", "speed_max")
_RANGES: Final = (_SPEEDS, ("default_num_inference_steps", "max_num_inference_steps"))
_DRAFT_PATH: Final = "draft_models_path"
_ADAPTERS: Final = "lora_adapters"
_MTP: Final = "mtp_mode"
_NO_MTP: Final = "multi-token prediction (MTP) is not supported"
_KV_CACHE_PRECISION: Final = "KV_CACHE_PRECISION"
_SERVED_PIPELINES: Final = ("AUTO", "LM_CB", "LM", "VLM_CB", "VLM")
_NO_DRAFT_SETTINGS: Final = "the draft model uses the settings of the main model"


class _Option(NamedTuple):
    field: str
    tasks: frozenset[Task]


_OPTIONS: Final[Mapping[str, _Option]] = {
    "target_device": _Option("device", _ALL_TASKS),
    "plugin_config": _Option("plugin_config", _ALL_TASKS),
    "idle_unload_seconds": _Option("idle_unload_seconds", _GENERATION | _TRANSCRIPTION | _SPEECH | _IMAGES),
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
            "draft_eagle3_mode",
            "prompt_lookup",
            "num_assistant_tokens",
            "reload",
        )
    },
    "draft_models_path": _Option("draft_path", _GENERATION),
    "draft_device": _Option("draft_device", _GENERATION),
    _ADAPTERS: _Option(_ADAPTERS, _GENERATION),
    "max_model_len": _Option("max_model_len", _GENERATION | _EMBEDDINGS | _RERANK),
    "pooling": _Option("pooling", _EMBEDDINGS),
    "default_prompt_name": _Option("default_prompt_name", _EMBEDDINGS),
    "normalize": _Option("normalize", _EMBEDDINGS),
    "truncate": _Option("truncate", _EMBEDDINGS),
    "max_inputs": _Option("max_inputs", _EMBEDDINGS | _RERANK),
    "max_allowed_chunks": _Option("max_allowed_chunks", _RERANK),
    "enable_word_timestamps": _Option("enable_word_timestamps", _TRANSCRIPTION),
    "voices": _Option("voices", _SPEECH),
    **{name: _Option(name, _SPEECH) for name in _SPEEDS},
    **{
        name: _Option(name, _IMAGES)
        for name in (
            "max_resolution",
            "default_resolution",
            "max_num_images_per_prompt",
            "default_num_inference_steps",
            "max_num_inference_steps",
            "resolution",
            "num_images_per_prompt",
            "guidance_scale",
        )
    },
}

TEXT_OPTIONS: Final = frozenset(_OPTIONS)
"""Options of text models, by OVMS's names where they exist."""

_NOT_SERVED: Final = {
    **dict.fromkeys(
        (
            "draft_max_num_batched_tokens",
            "draft_cache_size",
            "draft_block_size",
            "draft_max_num_seqs",
            "draft_dynamic_split_fuse",
        ),
        (_NO_DRAFT_SETTINGS, "remove it"),
    ),
    "cache_eviction_config": ("cache eviction is not supported", "remove it"),
    "sparse_attention_config": ("sparse attention is not supported", "remove it"),
    "cache_interval_multiplier": ("not supported", "remove it"),
    "generation_config_path": (
        "sampling defaults come from the model's folder",
        "remove it, and place the file there as generation_config.json",
    ),
    "composite_lora_adapters": ("LoRA adapters of image models are not supported", "merge them before the conversion"),
    "max_position_embeddings": ("the model defines its maximum length", "remove it"),
    "max_length": ("the model defines its maximum length", "remove it"),
}
"""Unsupported OVMS options with message and suggestion."""


def parse_task(value: Any) -> Task:
    """Parse ``task``; raises ConfigError if it is unknown."""
    if value in TASKS:
        return Task(value)
    raise invalid_value_error("task", value, " or ".join(TASKS), suggestion=did_you_mean(str(value), TASKS))


def text_model_path(path: Path) -> Path:
    """Return the ``.gguf`` file of a folder that has one and no OpenVINO model; otherwise the path. Reads the disk."""
    try:
        names = [each.name for each in path.iterdir()]
    except (OSError, ValueError):
        return path
    quantized = [name for name in names if name.endswith(".gguf")]
    return path / quantized[0] if len(quantized) == 1 and not any(name.endswith(".xml") for name in names) else path


_PIPELINE_INDEX: Final = "model_index.json"  # of image-generation pipelines
_ENCODER: Final = frozenset({"openvino_model.xml", "openvino_tokenizer.xml"})
_IMAGE_LANGUAGE_MODEL: Final = frozenset({"openvino_language_model.xml", "openvino_text_embeddings_model.xml"})
_ENCODER_DECODER: Final = frozenset({"openvino_encoder_model.xml", "openvino_decoder_model.xml"})
_TASK_FILES: Final = (
    (Task.TEXT_GENERATION, _ENCODER | {"openvino_detokenizer.xml"}),
    (Task.TEXT_TO_SPEECH, _ENCODER_DECODER | {"openvino_postnet.xml"}),
    (Task.SPEECH_TO_TEXT, _ENCODER_DECODER | {"openvino_detokenizer.xml"}),
)
_ARCHITECTURES: Final = (
    ("ForSequenceClassification", Task.RERANK),
    ("ForCausalLM", Task.TEXT_GENERATION),
    ("LMHeadModel", Task.TEXT_GENERATION),
    ("WhisperForConditionalGeneration", Task.SPEECH_TO_TEXT),
    ("ForTextToSpeech", Task.TEXT_TO_SPEECH),
    ("ForMaskedLM", Task.EMBEDDINGS),
    ("Model", Task.EMBEDDINGS),
)
"""Endings of the architectures in ``config.json``."""
_CONFIG: Final = "config.json"
_SENTENCE_FILES: Final = ("modules.json", "1_Pooling/config.json")  # of sentence-transformers
_ANY_TASK: Final = "Qwen3ForCausalLM"
_TASK_NAMES: Final = (("rerank", Task.RERANK), ("embed", Task.EMBEDDINGS))
"""Parts of folder names that show the task of models with the architecture ``_ANY_TASK``, by OVMS's rule."""


def detect_task(path: Path) -> Task | None:
    """Return the task of a model by its files; None if there is no text model. Reads the disk."""
    return find_task(path)[0]


def find_task(path: Path) -> tuple[Task | None, str]:
    """Return the task of a model, and the file that shows it; None if there is no text model. Reads the disk.

    The architecture takes precedence, because Optimum writes a detokenizer for models of all tasks.
    """
    if path.suffix == ".gguf":
        return Task.TEXT_GENERATION, path.name
    try:
        names = {each.name for each in path.iterdir()}
        pooling = next((file for file in _SENTENCE_FILES if (path / file).is_file()), "")
    except (OSError, ValueError):
        return None, ""
    if _PIPELINE_INDEX in names:
        return Task.IMAGE_GENERATION, _PIPELINE_INDEX
    if names >= _IMAGE_LANGUAGE_MODEL:
        return Task.TEXT_GENERATION, min(_IMAGE_LANGUAGE_MODEL)
    by_files = next(
        ((task, max(files - _ENCODER - _ENCODER_DECODER)) for task, files in _TASK_FILES if files <= names), (None, "")
    )
    architectures = _architectures(path)
    named = next((of for ending, of in _ARCHITECTURES if any(each.endswith(ending) for each in architectures)), None)
    if not names >= _ENCODER:
        return by_files if named is by_files[0] or not architectures else (None, "")
    if pooling and named is not Task.RERANK:
        return Task.EMBEDDINGS, pooling
    if _ANY_TASK in architectures:
        # Exports of these models have no files of sentence-transformers.
        return next(((task, path.name) for part, task in _TASK_NAMES if part in path.name.lower()), by_files)
    return (named, _CONFIG) if named in {Task.RERANK, Task.EMBEDDINGS} else by_files


def _architectures(path: Path) -> list[str]:
    """Return the architectures in ``config.json``; none if the file is absent or invalid."""
    try:
        read = json.loads(read_regular_text(path / _CONFIG))
    except (OSError, ValueError, RecursionError):
        return []
    named = read.get("architectures") if isinstance(read, dict) else None
    return [each for each in named if isinstance(each, str)] if isinstance(named, list) else []


def parse_text_options(task: Task, options: Mapping[str, Any], directory: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Parse the options of a text model; invalid ones are omitted.

    Args:
        task: task of the model.
        options: values by name; unknown names are ignored.
        directory: base of relative paths.

    Returns:
        Fields of ``TextModelSpec``, and problems with the option as path.
    """
    fields: dict[str, Any] = {}
    problems: list[Problem] = []
    for option, value in options.items():
        if option in _NOT_SERVED:
            problems += _refused(option, value)
        elif option in _OPTIONS and task not in _OPTIONS[option].tasks:
            problems.append(_other_task(option, task))
        elif option in _OPTIONS:
            try:
                _read(option, value, fields, directory)
            except ConfigError as error:
                problems += error.problems
    return fields, [*problems, *_check_ranges(fields), *_check_resolutions(fields), *_check_proposals(fields)]


def _check_proposals(fields: dict[str, Any]) -> list[Problem]:
    """Check that one method proposes tokens, if any option of proposals is set."""
    looks_up = [fields.get("prompt_lookup"), fields.get("plugin_config", {}).get(PROMPT_LOOKUP)]
    if "draft_path" in fields and any(looks_up):
        return [Problem("cannot be combined with prompt_lookup", path=_DRAFT_PATH, suggestion="remove one of them")]
    if fields.get("draft_eagle3_mode") and "draft_path" not in fields:
        return [Problem(f"needs {_DRAFT_PATH}", path="draft_eagle3_mode", suggestion="set it, or remove this")]
    if "num_assistant_tokens" in fields and "draft_path" not in fields and not any(looks_up):
        message = f"needs {_DRAFT_PATH} or prompt_lookup"
        return [Problem(message, path="num_assistant_tokens", suggestion="set one of them, or remove it")]
    return []


def _check_ranges(fields: dict[str, Any]) -> Iterator[Problem]:
    for names in _RANGES:
        low, high = (fields.get(name, TextModelSpec.model_fields[name].default) for name in names)
        if low > high:
            message = f"{names[0]} ({low:g}) must be <= {names[1]} ({high:g})"
            yield Problem(message, path=next(name for name in names if name in fields))


def _check_resolutions(fields: dict[str, Any]) -> Iterator[Problem]:
    allowed = fields.get("resolution", "").split()
    if len(allowed) != 1:
        for name in ("num_images_per_prompt", "guidance_scale"):
            if name in fields:
                message = "is compiled into the model, which requires a single resolution"
                yield Problem(message, path=name, suggestion="set resolution, such as 512x512, or remove it")
    default = fields.get("default_resolution")
    if default is None:
        return
    if allowed and default not in allowed:
        yield Problem(
            "is not one of resolution", path="default_resolution", expected=" or ".join(allowed), found=default
        )
    highest = fields.get("max_resolution", TextModelSpec.model_fields["max_resolution"].default)
    if any(size > most for size, most in zip(parse_resolution(default), parse_resolution(highest), strict=True)):
        yield Problem(f"exceeds max_resolution ({highest})", path="default_resolution", found=default)


def _refused(option: str, value: Any) -> list[Problem]:
    if value is False:  # disabled
        return []
    message, suggestion = _NOT_SERVED[option]
    return [Problem(message, path=option, suggestion=suggestion)]


def _other_task(option: str, task: Task) -> Problem:
    tasks = ", ".join(sorted(each.value for each in _OPTIONS[option].tasks))
    message = f"is an option of models for {tasks}, and the task of this one is {task.value}"
    return Problem(message, path=option, suggestion="remove it")


def _read(option: str, value: Any, fields: dict[str, Any], directory: Path) -> None:
    field = _OPTIONS[option].field
    if option == "plugin_config":
        properties = plugin_settings(value)
        if _MTP in properties:
            hint = "openvino-genai has it for models that take images only; set draft_models_path or prompt_lookup"
            raise ConfigError([Problem(_NO_MTP, path=f"plugin_config.{_MTP}", suggestion=hint)])
        fields[field] = {**properties, **fields.get(field, {})}
    elif option == "kv_cache_precision":
        fields[field] = {**fields.get(field, {}), _KV_CACHE_PRECISION: value}
    elif option == "pipeline_type":
        _check_pipeline(value)
    elif option == _DRAFT_PATH:
        fields[field] = directory / local_path(value)
    elif option == "voices":
        fields[field] = _voices(value, directory)
    elif option == _ADAPTERS:
        fields[field] = _adapters(value, directory)
    else:
        fields[field] = parse_value(option, value, keys_of(TextModelSpec)[field].type)


def _adapters(value: Any, directory: Path) -> tuple[LoraAdapter, ...]:
    """Parse adapters: a list of objects, also as JSON, or a text such as ``sql=adapters/sql,french=adapters/fr``."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else _named_paths(value)
        except (ValueError, RecursionError) as error:
            raise invalid_value_error(_ADAPTERS, value, "NAME=PATH,... or a JSON list of objects") from error
    adapters = parse_value(_ADAPTERS, value, tuple[LoraAdapter, ...])
    faults = [
        replace(problem, path=f"{_ADAPTERS}[{place}].name")
        for place, each in enumerate(adapters)
        for problem in check_name(each.name)
    ]
    if faults:
        raise ConfigError(faults)
    return tuple(each.model_copy(update={"path": directory / local_path(each.path)}) for each in adapters)


def parse_adapter(name: str, config: str) -> tuple[str, LoraAdapter] | None:
    """Parse the settings of a load request as a LoRA adapter: ``{"parent": "chat", "path": "/adapters/sql"}``.

    Returns:
        The name of the model, and the adapter; None for other settings.

    Raises:
        ConfigError: malformed.
    """
    given = parse_json_object("config", config)
    parent = given.pop("parent", None)
    if parent is None:
        return None
    problems = check_name(name)
    if not isinstance(parent, str):
        problems.append(Problem("expected the name of a model", path="config.parent", found=to_short_json(parent)))
    if problems:
        raise ConfigError(problems)
    adapter: LoraAdapter = parse_value("config", {**given, "name": name}, LoraAdapter)
    return str(parent), adapter.model_copy(update={"path": Path.cwd() / local_path(adapter.path)})


def _named_paths(text: str) -> list[dict[str, str]]:
    pairs = (each.split("=", 1) for each in text.split(","))
    return [{"name": name.strip(), "path": path.strip()} for name, path in pairs]


def _voices(value: Any, directory: Path) -> dict[str, Path]:
    """Parse voice files, an object, or a list of name and path as in graphs; the last of a name is used."""
    if isinstance(value, Mapping):
        value = [{"name": name, "path": path} for name, path in value.items()]
    expected = 'an object such as {"anna": "voices/anna.bin"}'
    if not isinstance(value, list):
        raise invalid_value_error("voices", value, expected)
    voices = {}
    for each in value:
        name, path = (each.get("name"), each.get("path")) if isinstance(each, Mapping) else (None, None)
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise invalid_value_error("voices", each, expected)
        voices[name] = directory / path
    return voices


def _check_pipeline(value: Any) -> None:
    expected = ", ".join(_SERVED_PIPELINES)
    if value == "OMNI":
        message = "sound of requests and of answers is not supported"
        raise invalid_value_error(
            "pipeline_type", value, expected, message=message, suggestion="use VLM_CB for text and images"
        )
    if value not in _SERVED_PIPELINES:
        raise invalid_value_error(
            "pipeline_type", value, expected, suggestion=did_you_mean(str(value), _SERVED_PIPELINES)
        )


# Entries

TEXT_MODELS: Final = "text_model_config_list"
Object = dict[str, Any]


class _Entry(Schema):
    config: Object


def _form(option: str) -> Any:
    """Return the type of an option's value in JSON, without bounds and choices."""
    field = _OPTIONS[option].field
    if option in {"pipeline_type", "kv_cache_precision"}:
        return str
    kind: Any = TextModelSpec.model_fields[field].annotation
    if get_origin(kind) in {Union, UnionType}:
        kind = next(each for each in get_args(kind) if each is not type(None))
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(kind) is dict:
        return Object
    if option == _ADAPTERS:
        return list[LoraAdapter]
    return str if get_origin(kind) is Literal or kind is Path else kind


_KEYS: Final[dict[str, Any]] = {
    "name": (str, ...),
    "base_path": (str, ...),
    "task": (str, OPTIONAL),
    **{option: (_form(option), OPTIONAL) for option in _OPTIONS},
}
TextModelEntry = create_model("TextModelEntry", __base__=ServiceEntry, **_KEYS)
"""Keys of ``config`` and the form of their values; out-of-range values are problems of the model."""


def read_text_models(file: ConfigFile) -> list[TextModelSpec]:
    """Parse the entries in order, each followed by its adapters; the first of a name is used."""
    configs = [check_members(each, _Entry, file.findings).get("config") for each in file.items(TEXT_MODELS)]
    found = file.entries(TextModelSpec.kind, [each for each in configs if each is not None], TextModelEntry)
    return [spec for entry in found for spec in _read_entry(entry, file).with_adapters()]


def _read_entry(entry: Entry, file: ConfigFile) -> TextModelSpec:
    task, fields, problems = _read_settings(entry.values, file.directory)
    path = text_model_path(file.directory / entry.values["base_path"])
    base_path = path.parent if path.suffix == ".gguf" else path
    return entry.build(
        TextModelSpec, problems, base_path=base_path, path=path, task=task, cache_dir=file.cache_dir, **fields
    )


def _read_settings(given: Mapping[str, Any], directory: Path) -> tuple[Task, dict[str, Any], list[Problem]]:
    problems = [*check_name(given["name"]), *check_base_path(given["base_path"])]
    try:
        task = (
            parse_task(given["task"])
            if "task" in given
            else detect_task(text_model_path(directory / given["base_path"]))
        )
        task = task or Task.TEXT_GENERATION
    except ConfigError as error:
        return Task.TEXT_GENERATION, {}, [*problems, *error.problems]
    fields, wrong = parse_text_options(
        task, {key: value for key, value in given.items() if key in TEXT_OPTIONS}, directory
    )
    return task, fields, problems + wrong
