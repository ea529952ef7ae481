"""The options of one model, whichever of ``config.json`` and the command line they were written in.

::

    option name -> value as written ── read_model_options ──> fields of ModelSpec, problems
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from ovmstrio.config.batching import batching_contradictions, parse_batching
from ovmstrio.config.by_tensor import object_in_text
from ovmstrio.config.findings import shown, wrong
from ovmstrio.config.layouts import parse_layouts
from ovmstrio.config.policies import parse_version_policy
from ovmstrio.config.preprocessing import parse_color_formats, parse_mean, parse_precisions, parse_scale
from ovmstrio.config.shapes import parse_batch_size, parse_shapes
from ovmstrio.config.specs import BatchSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError, Problem

__all__ = [
    "LAYOUT_DEPENDENT",
    "STATEFUL_ONLY",
    "check_base_path",
    "check_local_path",
    "check_name",
    "parse_plugin_config",
    "read_model_options",
]

LAYOUT_DEPENDENT: Final = ("precision", "color_format", "mean", "scale")
"""Options that mean nothing without a layout."""

STATEFUL_ONLY: Final = (
    "idle_sequence_cleanup",
    "low_latency_transformation",
    "max_sequence_number",
    "sequence_migration",
)
"""Options that only a stateful model may have."""

_NOT_STATEFUL: Final = "Stateful model config parameter used for non stateful model"
_NO_AUTO: Final = "Dynamic shape and dynamic batch size are not supported for stateful models"

_MAX_NIREQ: Final = 100_000
_MAX_SEQUENCES: Final = 2**32 - 1
_REMOTE: Final = ("s3://", "gs://", "az://", "azfs://")


def read_model_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Read the options of a model; those that cannot be read are left out.

    Args:
        options: what the user wrote, by OVMS's names; other names are passed over.

    Returns:
        Fields of ``ModelSpec``, and the problems: ``path`` is the option, and a dot and a tensor's name where there
        is one.  The model is to be served if none of them is an error.
    """
    fields: dict[str, Any] = {}
    problems: list[Problem] = []
    for option, value in options.items():
        if option not in _READERS:
            continue
        field, read = _READERS[option]
        try:
            fields[field] = read(value)
        except ConfigError as error:
            problems.extend(error.problems)
    problems.extend(_contradictions(options, fields))
    return fields, problems


def check_name(name: str) -> list[Problem]:
    """Check what a model is called."""
    if name:
        return []
    return [Problem("the name is empty", path="name", expected="a text that is not empty", found='""')]


def check_base_path(base_path: str) -> list[Problem]:
    """Check the spelling of a model's path; whether it exists is found out when it is loaded."""
    problem = Problem("the path cannot be used", path="base_path", found=shown(base_path))
    if not base_path:
        return [replace(problem, expected="the directory that holds the model's versions")]
    problems = check_local_path(base_path)
    if not problems and ".." in PurePosixPath(base_path).parts:
        problems = [replace(problem, expected="a path without '..'", suggestion="write it from the root, or from here")]
    return problems


def check_local_path(path: str) -> list[Problem]:
    """Check that a path can be one of this machine's."""
    problem = Problem("the path cannot be used", path="base_path", expected="a local path", found=shown(path))
    if path.startswith(_REMOTE):
        return [replace(problem, message="remote storage is not served by this version")]
    return [replace(problem, expected="a path without the character NUL")] if "\0" in path else []


def parse_plugin_config(value: Any) -> dict[str, str]:
    """Read the option ``plugin_config``: an object, or a text that holds one (command line).

    Raises:
        ConfigError: it is no object of texts, numbers and booleans.
    """
    settings = object_in_text("plugin_config", value) if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise wrong("plugin_config", value, 'an object such as {"NUM_STREAMS": "2"}')
    texts: dict[str, str] = {}
    for key, setting in settings.items():
        if isinstance(setting, bool):
            texts[key] = "YES" if setting else "NO"
        elif isinstance(setting, str | int | float):
            texts[key] = str(setting)
        else:
            raise wrong(f"plugin_config.{key}", setting, "a text, a number, true or false")
    return texts


def _integer(option: str, highest: int, too_high: str = "") -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= highest:
            message = too_high if isinstance(value, int) and value > highest else ""
            raise wrong(option, value, f"an integer of 0 to {highest}", message=message)
        return value

    return read


def _flag(option: str) -> Callable[[Any], bool]:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise wrong(option, value, "true or false")
        return value

    return read


def _device(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise wrong("target_device", value, "a device of OpenVINO such as CPU, GPU or AUTO")
    return value.strip()


_READERS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "model_version_policy": ("version_policy", parse_version_policy),
    "batch_size": ("batch", parse_batch_size),
    "batching": ("batching", parse_batching),
    "shape": ("shapes", parse_shapes),
    "layout": ("layouts", parse_layouts),
    "precision": ("precisions", parse_precisions),
    "color_format": ("color_formats", parse_color_formats),
    "mean": ("mean", parse_mean),
    "scale": ("scale", parse_scale),
    "nireq": ("nireq", _integer("nireq", _MAX_NIREQ)),
    "target_device": ("target_device", _device),
    "plugin_config": ("plugin_config", parse_plugin_config),
    "allow_cache": ("allow_cache", _flag("allow_cache")),
    "stateful": ("stateful", _flag("stateful")),
    "idle_sequence_cleanup": ("idle_sequence_cleanup", _flag("idle_sequence_cleanup")),
    "low_latency_transformation": ("low_latency_transformation", _flag("low_latency_transformation")),
    "max_sequence_number": (
        "max_sequence_number",
        _integer("max_sequence_number", _MAX_SEQUENCES, "Sequence max number parameter too high"),
    ),
    "sequence_migration": ("sequence_migration", _flag("sequence_migration")),
}
"""For each option the field of ``ModelSpec`` that it sets, and what reads it."""


def _contradictions(options: Mapping[str, Any], fields: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    stateful = fields.get("stateful", False)
    if stateful:
        problems.extend(_no_auto(fields))
    else:
        problems.extend(
            Problem(_NOT_STATEFUL, path=option, suggestion="set stateful as well")
            for option in STATEFUL_ONLY
            if option in options
        )
    problems.extend(batching_contradictions(fields))
    if "batch_size" in options and "shape" in options:
        message = "a shape is set, which settles the batch size too"
        problems.append(Problem(message, path="batch_size", suggestion="leave one of them out", severity="warning"))
    if "layout" not in options:
        problems.extend(
            Problem("this needs a layout", path=option, suggestion="set layout, such as NHWC:NCHW")
            for option in LAYOUT_DEPENDENT
            if option in options
        )
    return problems


def _no_auto(fields: Mapping[str, Any]) -> list[Problem]:
    batch: BatchSpec | None = fields.get("batch")
    shapes: Mapping[str, ShapeSpec] = fields.get("shapes", {})
    automatic = {"batch_size": batch is not None and batch.auto, "shape": any(s.auto for s in shapes.values())}
    return [
        Problem(_NO_AUTO, path=option, expected="a fixed size", found='"auto"')
        for option, is_auto in automatic.items()
        if is_auto
    ]
