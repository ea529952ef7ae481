"""Parsers of model options from ``config.json`` and the command line.

::

    option name -> value ── read_model_options ──> fields of ModelSpec, problems
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

from pydantic import Field

from ovmstrio.config.documents import did_you_mean, invalid_value_error, member_path
from ovmstrio.config.schema import keys_of, parse_value
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
    ModelSpec,
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
    return parse_value(member_path(_POLICY, kind), details, policy)


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
        if option not in MODEL_OPTIONS:
            continue
        field, _, parse = MODEL_OPTIONS[option]
        try:
            fields[field] = parse(value) if parse else parse_value(option, value, keys_of(ModelSpec)[field].type)
        except ConfigError as error:
            problems.extend(error.problems)
    problems.extend(_contradictions(options, fields))
    return fields, problems


def plugin_settings(value: Any) -> dict[str, Any]:
    """Return the properties of ``plugin_config``, an object or JSON text (command line).

    Raises:
        ConfigError: not an object of strings, numbers and booleans.
    """
    settings = parse_json_object("plugin_config", value) if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise invalid_value_error("plugin_config", value, 'an object such as {"NUM_STREAMS": "2"}')
    for key, setting in settings.items():
        if not isinstance(setting, str | int | float):
            raise invalid_value_error(member_path("plugin_config", key), setting, "a text, a number, true or false")
    return dict(settings)


def parse_plugin_config(value: Any) -> dict[str, str]:
    """Parse ``plugin_config`` as OpenVINO's texts; raises ConfigError if malformed."""
    words = {True: "YES", False: "NO"}
    return {
        key: words[setting] if isinstance(setting, bool) else str(setting)
        for key, setting in plugin_settings(value).items()
    }


def _max_sequence_number(value: Any) -> int:
    if isinstance(value, int) and value > _MAX_SEQUENCES:
        message = "Sequence max number parameter too high"
        raise invalid_value_error("max_sequence_number", value, f"an integer of 0 to {_MAX_SEQUENCES}", message=message)
    number: int = parse_value("max_sequence_number", value, keys_of(ModelSpec)["max_sequence_number"].type)
    return number


def _device(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise invalid_value_error("target_device", value, "a device of OpenVINO such as CPU, GPU or AUTO")
    return value.strip()


class _Option(NamedTuple):
    """A model option: field of ``ModelSpec``, form in JSON, and parser; by default the type of the field."""

    field: str
    form: Any
    parse: Callable[[Any], Any] | None = None


_Count = Annotated[int, Field(ge=0)]
_Object = dict[str, Any]
_ByTensor = str | dict[str, str]
_Numbers = str | float | list[float]
_FLAGS: Final = ("stateful", "idle_sequence_cleanup", "low_latency_transformation", "sequence_migration", "allow_cache")
MODEL_OPTIONS: Final[Mapping[str, _Option]] = {
    "batch_size": _Option("batch", _Count | str, parse_batch_size),
    "batching": _Option("batching", _Object, parse_batching),
    "shape": _Option("shapes", _ByTensor, parse_shapes),
    "shape_buckets": _Option("shape_buckets", _Object, parse_shape_buckets),
    "layout": _Option("layouts", _ByTensor, parse_layouts),
    "mean": _Option("mean", _Numbers, parse_mean),
    "scale": _Option("scale", _Numbers, parse_scale),
    "precision": _Option("precisions", _ByTensor, parse_precisions),
    "color_format": _Option("color_formats", _ByTensor, parse_color_formats),
    "model_version_policy": _Option("version_policy", _Object, parse_version_policy),
    "nireq": _Option("nireq", _Count),
    "target_device": _Option("target_device", str, _device),
    "plugin_config": _Option("plugin_config", dict[str, str | bool | int | float], parse_plugin_config),
    "max_sequence_number": _Option("max_sequence_number", _Count, _max_sequence_number),
    **{flag: _Option(flag, bool) for flag in _FLAGS},
}
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
