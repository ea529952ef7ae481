"""What is done to inputs in front of a model: ``precision``, ``color_format``, ``mean``, ``scale``."""

from __future__ import annotations

import math
from typing import Any, Final

from ovmstrio.config.findings import did_you_mean, wrong
from ovmstrio.config.shapes import by_tensor
from ovmstrio.core.datatypes import BY_NAME

__all__ = [
    "COLOR_FORMATS",
    "PRECISIONS",
    "format_numbers",
    "parse_color_formats",
    "parse_mean",
    "parse_precisions",
    "parse_scale",
]

PRECISIONS: Final = tuple(name for name in BY_NAME if name != "BYTES")
"""Element types that inputs may be given in, by KServe's names."""

COLOR_FORMATS: Final = ("BGR", "RGB", "GRAY", "BGRX", "RGBX", "NV12", "NV12_2", "I420", "I420_3")
"""The colour formats that OpenVINO converts."""

_OVMS_PRECISIONS: Final = {
    name.replace("UINT", "U").replace("INT", "I"): name for name in PRECISIONS if name.startswith(("INT", "UINT"))
}
"""OVMS's own names of integers (``I64``, ``U8``)."""


def parse_precisions(value: Any) -> dict[str, str]:
    """Read the option ``precision``: ``FP32``, ``input:FP32``, or an object with the precision of each input.

    A pair such as ``uint8:fp32`` is OVMS's ``<target>:<source>``: what requests bring, and what the model takes, which
    is known from the model itself.

    Returns:
        KServe's name of the precision, by input; ``""`` is for all.

    Raises:
        ConfigError: with every precision that cannot be read.
    """
    if isinstance(value, str) and ":" in value and not value.lstrip().startswith("{"):
        name, _, precision = value.rpartition(":")
        if _known_name(name) not in PRECISIONS:
            value = {name.strip(): precision}
    return by_tensor("precision", value, _precision)


def _precision(option: str, text: str) -> str:
    names = [_known_name(part) for part in text.split(":")]
    unknown = [name for name in names if name not in PRECISIONS]
    if unknown or len(names) > len(("target", "source")):
        form = f"one of {', '.join(PRECISIONS)}, such as FP32, input:FP32 or UINT8:FP32"
        raise wrong(option, text, form, suggestion=did_you_mean(unknown[0], PRECISIONS) if unknown else "")
    return names[0]


def _known_name(text: str) -> str:
    name = text.strip().upper()
    return _OVMS_PRECISIONS.get(name, name)


def parse_color_formats(value: Any) -> dict[str, str]:
    """Read the option ``color_format``: ``BGR``, ``NV12:RGB`` (given and wanted), or an object of these by input.

    Raises:
        ConfigError: with every format that cannot be read.
    """
    return by_tensor("color_format", value, _color_format)


def _color_format(option: str, text: str) -> str:
    parts = text.upper().replace(" ", "").split(":")
    unknown = [part for part in parts if part not in COLOR_FORMATS]
    if unknown or len(parts) > len(("given", "wanted")):
        form = f"one of {', '.join(COLOR_FORMATS)}, or two such as NV12:RGB"
        raise wrong(option, text, form, suggestion=did_you_mean(unknown[0], COLOR_FORMATS) if unknown else "")
    return ":".join(parts)


def parse_mean(value: Any) -> tuple[float, ...]:
    """Read the option ``mean``: one number, or one a channel.

    Raises:
        ConfigError: it has another form.
    """
    return _numbers("mean", value)


def parse_scale(value: Any) -> tuple[float, ...]:
    """Read the option ``scale``: one number, or one a channel.

    Raises:
        ConfigError: it has another form, or a number is zero.
    """
    numbers = _numbers("scale", value)
    if 0 in numbers:
        raise wrong("scale", value, "numbers other than 0, because values are divided by them")
    return numbers


def format_numbers(numbers: tuple[float, ...]) -> str:
    """Write mean or scale as they are read."""
    return str(numbers[0]) if len(numbers) == 1 else f"[{','.join(map(str, numbers))}]"


def _numbers(option: str, value: Any) -> tuple[float, ...]:
    text = str(value).strip()
    if text[:1] + text[-1:] in {"[]", "()"}:
        text = text[1:-1]
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise wrong(option, value, "a number such as 127.5, or one a channel such as [123.7,116.3,103.5]")
    return numbers
