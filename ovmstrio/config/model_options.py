"""Parsers of model options from ``config.json`` and the command line.

::

    option name -> value ── read_model_options ──> fields of ModelSpec, problems
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ovmstrio.config.documents import did_you_mean, invalid_value_error
from ovmstrio.config.schema import parse_value
from ovmstrio.config.shapes import (
    bucket_conflicts,
    format_batch_size,
    parse_batch_size,
    parse_by_tensor,
    parse_json_object,
    parse_layouts,
    parse_shape_buckets,
    parse_shapes,
)
from ovmstrio.config.specs import (
    AllVersions,
    BatchingSpec,
    BatchSpec,
    LatestVersions,
    ShapeSpec,
    SpecificVersions,
    VersionPolicy,
)
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import BY_NAME

# Preprocessing

PRECISIONS: Final = tuple(name for name in BY_NAME if name != "BYTES")
"""Input element types, by KServe name."""

COLOR_FORMATS: Final = ("BGR", "RGB", "GRAY", "BGRX", "RGBX", "NV12", "NV12_2", "I420", "I420_3")
"""Color formats that OpenVINO converts."""

_OVMS_PRECISIONS: Final = {
    name.replace("UINT", "U").replace("INT", "I"): name for name in PRECISIONS if name.startswith(("INT", "UINT"))
}
"""OVMS's integer names (``I64``, ``U8``)."""


def parse_precisions(value: Any) -> dict[str, str]:
    """Parse ``precision``: ``FP32``, ``input:FP32``, or an object by input.

    A pair such as ``uint8:fp32`` is OVMS's ``<target>:<source>``, request and model type; the model type is known
    anyway.

    Returns:
        KServe's name of the precision by input; ``""`` is for all.

    Raises:
        ConfigError: invalid precisions, all of them.
    """
    if isinstance(value, str) and ":" in value and not value.lstrip().startswith("{"):
        name, _, precision = value.rpartition(":")
        if _known_name(name) not in PRECISIONS:
            value = {name.strip(): precision}
    return parse_by_tensor("precision", value, _precision)


def _precision(option: str, text: str) -> str:
    names = [_known_name(part) for part in text.split(":")]
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown or len(names) > len(("target", "source")):
        form = f"one of {', '.join(PRECISIONS)}, such as FP32, input:FP32 or UINT8:FP32"
        raise invalid_value_error(
            option, text, form, suggestion=did_you_mean(unknown[0], PRECISIONS) if unknown else ""
        )
    return names[0]


def _known_name(text: str) -> str:
    name = text.strip().upper()
    return _OVMS_PRECISIONS.get(name, name)


def parse_color_formats(value: Any) -> dict[str, str]:
    """Parse ``color_format``: ``BGR``, ``NV12:RGB`` (request and model), or an object by input.

    Raises:
        ConfigError: invalid formats, all of them.
    """
    return parse_by_tensor("color_format", value, _color_format)


def _color_format(option: str, text: str) -> str:
    parts = text.upper().replace(" ", "").split(":")
    unknown = [part for part in parts if part not in COLOR_FORMATS]
    if unknown or len(parts) > len(("given", "wanted")):
        form = f"one of {', '.join(COLOR_FORMATS)}, or two such as NV12:RGB"
        raise invalid_value_error(
            option, text, form, suggestion=did_you_mean(unknown[0], COLOR_FORMATS) if unknown else ""
        )
    return ":".join(parts)


def parse_mean(value: Any) -> tuple[float, ...]:
    """Parse ``mean``: one number, or one per channel; raises ConfigError if malformed."""
    return _numbers("mean", value)


def parse_scale(value: Any) -> tuple[float, ...]:
    """Parse ``scale``: one number, or one per channel; raises ConfigError if malformed, or a number is zero."""
    numbers = _numbers("scale", value)
    if 0 in numbers:
        raise invalid_value_error("scale", value, "non-zero numbers")
    return numbers


def _numbers(option: str, value: Any) -> tuple[float, ...]:
    text = str(value).strip()
    if text[:1] + text[-1:] in {"[]", "()"}:
        text = text[1:-1]
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise invalid_value_error(option, value, "a number such as 127.5, or one a channel such as [123.7,116.3,103.5]")
    return numbers


# Version policy

_POLICY: Final = "model_version_policy"
_POLICY_FORM: Final = '{"latest": {"num_versions": 2}}, {"all": {}} or {"specific": {"versions": [1, 3]}}'
_POLICIES: Final[Mapping[str, type[VersionPolicy]]] = {
    "latest": LatestVersions,
    "all": AllVersions,
    "specific": SpecificVersions,
}


def parse_version_policy(value: Any) -> VersionPolicy:
    """Parse ``model_version_policy``: an object, or JSON text (command line); raises ConfigError if malformed."""
    if isinstance(value, str):
        value = parse_json_object(_POLICY, value)
    if not isinstance(value, Mapping):
        raise invalid_value_error(_POLICY, value, _POLICY_FORM)
    if len(value) != 1:
        raise invalid_value_error(_POLICY, value, _POLICY_FORM, message="exactly one policy must be named")
    kind, details = next(iter(value.items()))
    policy = _POLICIES.get(kind)
    if policy is None:
        suggestion = did_you_mean(str(kind), _POLICIES)
        raise invalid_value_error(
            _POLICY, value, _POLICY_FORM, message=f"unknown policy {kind!r}", suggestion=suggestion
        )
    return parse_value(f"{_POLICY}.{kind}", details, policy)


_BATCHING_FORM: Final = 'an object such as {"max_batch_size": 16, "batch_timeout_ms": 5}'


def parse_batching(value: Any) -> BatchingSpec:
    """Parse ``batching``: an object, or JSON text (command line).

    Raises:
        ConfigError: malformed, with all problems.
    """
    settings = parse_json_object("batching", value) if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise invalid_value_error("batching", value, _BATCHING_FORM)
    return parse_value("batching", settings, BatchingSpec)


def batching_conflicts(fields: Mapping[str, Any]) -> list[Problem]:
    """Return conflicts of batching with other settings, fields of ``ModelSpec``."""
    batching: BatchingSpec | None = fields.get("batching")
    if batching is None:
        return []
    problems: list[Problem] = []
    if fields.get("stateful", False):
        message = "batching is not supported for stateful models"
        problems.append(Problem(message, path="batching", suggestion="remove batching or stateful"))
    batch: BatchSpec | None = fields.get("batch")
    if batch is not None and not _accepts_batches(batch, batching.max_batch_size):
        problems.append(
            Problem(
                "batch_size excludes batches of batching",
                path="batch_size",
                expected=f"1 to {batching.max_batch_size}, because of batching",
                found=format_batch_size(batch),
                suggestion="remove batch_size",
            )
        )
    shapes: Mapping[str, ShapeSpec] = fields.get("shapes", {})
    if any(shape.auto for shape in shapes.values()):
        message = "shape auto is not supported with batching"
        problems.append(Problem(message, path="shape", found="auto", suggestion="use -1 for variable sizes"))
    return problems


def _accepts_batches(batch: BatchSpec, largest: int) -> bool:
    return batch.dim is not None and batch.dim.accepts(1) and batch.dim.accepts(largest)


LAYOUT_DEPENDENT: Final = ("precision", "color_format", "mean", "scale")
"""Options that require a layout."""

STATEFUL_ONLY: Final = (
    "idle_sequence_cleanup",
    "low_latency_transformation",
    "max_sequence_number",
    "sequence_migration",
)
"""Options that require a stateful model."""

_NOT_STATEFUL: Final = "Stateful model config parameter used for non stateful model"
_NO_AUTO: Final = "Dynamic shape and dynamic batch size are not supported for stateful models"

_MAX_NIREQ: Final = 100_000
_MAX_SEQUENCES: Final = 2**32 - 1


def parse_model_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Parse the options of a model; invalid ones are omitted.

    Args:
        options: values by OVMS's option names; other names are ignored.

    Returns:
        Fields of ``ModelSpec``, and problems with the path ``option`` or ``option.tensor``.
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


def parse_plugin_config(value: Any) -> dict[str, str]:
    """Parse ``plugin_config``: an object, or JSON text (command line).

    Raises:
        ConfigError: not an object of strings, numbers and booleans.
    """
    settings = parse_json_object("plugin_config", value) if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise invalid_value_error("plugin_config", value, 'an object such as {"NUM_STREAMS": "2"}')
    texts: dict[str, str] = {}
    for key, setting in settings.items():
        if isinstance(setting, bool):
            texts[key] = "YES" if setting else "NO"
        elif isinstance(setting, str | int | float):
            texts[key] = str(setting)
        else:
            raise invalid_value_error(f"plugin_config.{key}", setting, "a text, a number, true or false")
    return texts


def _integer(option: str, highest: int, too_high: str = "") -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= highest:
            message = too_high if isinstance(value, int) and value > highest else ""
            raise invalid_value_error(option, value, f"an integer of 0 to {highest}", message=message)
        return value

    return read


def _flag(option: str) -> Callable[[Any], bool]:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise invalid_value_error(option, value, "true or false")
        return value

    return read


def _device(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise invalid_value_error("target_device", value, "a device of OpenVINO such as CPU, GPU or AUTO")
    return value.strip()


_READERS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "model_version_policy": ("version_policy", parse_version_policy),
    "batch_size": ("batch", parse_batch_size),
    "batching": ("batching", parse_batching),
    "shape": ("shapes", parse_shapes),
    "shape_buckets": ("shape_buckets", parse_shape_buckets),
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
"""Field of ``ModelSpec`` and parser by option."""

MODEL_OPTIONS: Final = frozenset(_READERS)
"""Model options, by OVMS's names."""


def _contradictions(options: Mapping[str, Any], fields: dict[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    stateful = fields.get("stateful", False)
    if stateful:
        problems.extend(_no_auto(fields))
    else:
        problems.extend(
            Problem(_NOT_STATEFUL, path=option, suggestion="set stateful")
            for option in STATEFUL_ONLY
            if option in options
        )
    problems.extend(batching_conflicts(fields))
    problems.extend(bucket_conflicts(fields))
    if "batch_size" in options and "shape" in options:
        message = "shape overrides batch_size"
        problems.append(Problem(message, path="batch_size", suggestion="remove one of them", severity="warning"))
    if "layout" not in options:
        problems.extend(
            Problem("requires a layout", path=option, suggestion="set layout, such as NHWC:NCHW")
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
