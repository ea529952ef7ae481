"""Options of OpenVINO Model Server that mean something there and nothing here, each with what to do in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["WAYS_OUT", "refused_options"]

_FETCHING: Final = (
    "models are fetched from no hub: put the model's folder, or its .gguf, in place and name it with --model_name and "
    "--model_path, or in the file of --config_path; ovms prepare makes it of files of other formats, and "
    "ovms prepare --sample chat has a model that chats"
)
_DRAFTING: Final = "the model of --draft_models_path has the settings of the first: leave it out, answers are the same"
_IMAGES: Final = "models that take or make images are not served: leave it out"
_ENGINE: Final = 'it is no option here; what is one of OpenVINO goes into --plugin_config, such as {"NUM_STREAMS": "1"}'
_CONFIGURING: Final = (
    'the file of --config_path is edited as a text: {"config": {"name": NAME, "base_path": FOLDER}} in its '
    "model_config_list is a model; a running server follows it, and ovms check tells what is wrong with it"
)

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
    "add_to_config": _CONFIGURING,
    "remove_from_config": _CONFIGURING,
    "list_models": "ovms models lists what a server serves, and ovms check tells what a configuration would",
    "trace_path": "times of calls are in /metrics, and those of each node of a pipeline of Ops in ovms trace",
}
"""What to do in place of an option; options that are accepted without effect are ``settings.IGNORED``."""


def refused_options(arguments: Iterable[str]) -> list[str]:
    """Say what to do in place of the options of OVMS among arguments that are not served: a line for each way out."""
    names = (argument[2:].partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--"))
    by_way_out: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if name in WAYS_OUT:
            by_way_out.setdefault(WAYS_OUT[name], []).append(f"--{name}")
    return [f"{', '.join(options)}: {way_out}" for way_out, options in by_way_out.items()]
