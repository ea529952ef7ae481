"""Options of OpenVINO Model Server that mean something there and nothing here, each with what to do in its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

__all__ = ["CONFIGURING", "WAYS_OUT", "refused_options", "with_source_in_place"]

_FETCHING: Final = (
    "models are fetched from no hub: put the model's folder, or its .gguf, in place and name it with --model_name and "
    "--model_path, with --source_model and --model_repository_path for a folder of that name in this one, or in the "
    "file of --config_path; ovms prepare makes it of files of other formats, and "
    "ovms prepare --sample chat has a model that chats"
)
_DRAFTING: Final = "the model of --draft_models_path has the settings of the first: leave it out, answers are the same"
_IMAGES: Final = "models that take or make images are not served: leave it out"
_ENGINE: Final = 'it is no option here; what is one of OpenVINO goes into --plugin_config, such as {"NUM_STREAMS": "1"}'
_CONFIGURING: Final = (
    "no files are written for models: --task and its options serve a folder as it is, and --add_to_config puts it into "
    "model_config_list or text_model_config_list of the file of --config_path"
)

CONFIGURING: Final = frozenset({"list_models", "add_to_config", "remove_from_config"})
"""Options that stand for commands of their own."""

WAYS_OUT: Final = {
    **dict.fromkeys(
        (
            "pull",
            "source_model",
            "model_repository_path",
            "gguf_filename",
            "overwrite_models",
            "weight_format",
            "extra_quantization_params",
            "source_loras",
            "draft_source_model",
        ),
        _FETCHING,
    ),
    **dict.fromkeys(
        (
            "draft_cache_size",
            "draft_eagle3_mode",
            "draft_max_num_batched_tokens",
            "draft_max_num_seqs",
        ),
        _DRAFTING,
    ),
    **dict.fromkeys(
        (
            "allowed_local_media_path",
            "allowed_media_domains",
            "default_num_inference_steps",
            "default_resolution",
            "guidance_scale",
            "max_num_images_per_prompt",
            "max_num_inference_steps",
            "max_resolution",
            "num_images_per_prompt",
            "resolution",
        ),
        _IMAGES,
    ),
    **dict.fromkeys(
        ("cache_interval_multiplier", "max_prompt_len", "model_distribution_policy", "model_type", "num_streams"),
        _ENGINE,
    ),
    "configure": _CONFIGURING,
    "trace_path": "times of calls are in /metrics, and those of each node of a pipeline of Ops in ovms trace",
}
"""What to do in place of an option; options that are accepted without effect are ``settings.IGNORED``."""


def refused_options(arguments: Iterable[str]) -> list[str]:
    """Say what to do in place of the options of OVMS among arguments that are not served: a line for each way out."""
    names = (_name_of(argument) for argument in arguments)
    by_way_out: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if name in WAYS_OUT:
            by_way_out.setdefault(WAYS_OUT[name], []).append(f"--{name}")
    return [f"{', '.join(options)}: {way_out}" for way_out, options in by_way_out.items()]


_FETCHED: Final = ("source_model", "model_repository_path", "gguf_filename")
_NEVER_IN_PLACE: Final = frozenset({"pull", "overwrite_models"})


def with_source_in_place(arguments: Sequence[str]) -> list[str]:
    """Write a model that OVMS would not fetch again, for its folder is there, as ``--model_name`` and ``--model_path``.

    ``--source_model Org/Model`` is the folder of that name in ``--model_repository_path``, of which ``--gguf_filename``
    is one file.  Arguments that want anything else are given as they are.
    """
    rest: list[str] = []
    said: dict[str, str] = {}
    names = {_name_of(argument) for argument in arguments}
    ahead = iter(arguments)
    for argument in ahead:
        if _name_of(argument) in _FETCHED:
            _, is_attached, value = argument.partition("=")
            said[_name_of(argument)] = value if is_attached else next(ahead, "")
        else:
            rest.append(argument)
    repository = said.get("model_repository_path") or os.environ.get("OVMS_MODEL_REPOSITORY_PATH", "")
    source = said.get("source_model", "")
    path = Path(repository) / source / said.get("gguf_filename", "")
    if not (repository and source) or names & _NEVER_IN_PLACE or "model_path" in names or not path.exists():
        return list(arguments)
    named = [] if "model_name" in names else ["--model_name", source]
    return [*rest, *named, "--model_path", str(path)]


def _name_of(argument: str) -> str:
    return argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""
