"""Shapes and batch sizes as OVMS writes them: ``(1,3,224,224)``, ``(-1,10)``, ``(2:8,10)``, ``auto``."""

from __future__ import annotations

import re
from typing import Any, Final

from ovmstrio.config.by_tensor import by_tensor
from ovmstrio.config.findings import wrong
from ovmstrio.config.specs import BatchSpec, ShapeSpec
from ovmstrio.core.tensor import ANY_SIZE, Dim

__all__ = ["format_batch_size", "format_shape", "parse_batch_size", "parse_shape", "parse_shapes"]

_SIZE: Final = re.compile(r"[0-9]{1,19}", re.ASCII)
_BLANKS: Final = re.compile(r"[ \t\r\n]+")
_MAX_SIZE: Final = 2**63 - 1
_AUTO: Final = "auto"

_SHAPE_FORM: Final = "dimensions in parentheses such as (1,3,224,224), each a size, -1 for any or a range 2:8; or auto"
_BATCH_FORM: Final = "a size such as 8, -1 for any, a range such as 2:8, or auto"


def parse_shapes(value: Any) -> dict[str, ShapeSpec]:
    """Read the option ``shape``: one shape, or an object with the shape of each input.

    Raises:
        ConfigError: with every shape that cannot be read.
    """
    return by_tensor("shape", value, parse_shape)


def parse_shape(option: str, text: str) -> ShapeSpec:
    """Read one shape.

    Raises:
        ConfigError: it has another form.
    """
    compact = _BLANKS.sub("", text)
    if compact.lower() == _AUTO:
        return ShapeSpec(auto=True)
    if not (compact.startswith("(") and compact.endswith(")")):
        bracketed = re.fullmatch(r"\[?([0-9,:-]+)\]?", compact)
        raise wrong(option, text, _SHAPE_FORM, suggestion=f"write ({bracketed[1]})" if bracketed else "")
    inner = compact[1:-1].removesuffix(",")
    return ShapeSpec(dims=tuple(_dim(option, text, part) for part in inner.split(",")) if inner else ())


def format_shape(shape: ShapeSpec) -> str:
    """Write a shape as :func:`parse_shape` reads it."""
    return _AUTO if shape.dims is None else f"({','.join(map(_format_dim, shape.dims))})"


def parse_batch_size(value: Any) -> BatchSpec | None:
    """Read the option ``batch_size``, an integer or a text; None leaves it to the model (``0``).

    Raises:
        ConfigError: it has another form.  That is a warning: the model's own batch size is used, as OVMS does.
    """
    text = _BLANKS.sub("", str(value))
    if text.lower() == _AUTO:
        return BatchSpec(auto=True)
    dim = _read_dim(text)
    if dim is None or isinstance(value, bool):
        suggestion = "the model's own batch size is used"
        raise wrong("batch_size", value, _BATCH_FORM, suggestion=suggestion, severity="warning")
    return None if dim == Dim.fixed(0) else BatchSpec(dim=dim)


def format_batch_size(batch: BatchSpec | None) -> str:
    """Write a batch size as :func:`parse_batch_size` reads it."""
    if batch is None:
        return "0"
    return _AUTO if batch.dim is None else _format_dim(batch.dim)


def _dim(option: str, text: str, part: str) -> Dim:
    dim = _read_dim(part)
    if dim is None:
        raise wrong(option, text, _SHAPE_FORM, message=f"{part!r} is no dimension")
    return dim


def _read_dim(text: str) -> Dim | None:
    if text == "-1":
        return ANY_SIZE
    low, colon, high = text.partition(":")
    sizes = [int(size) for size in ((low, high) if colon else (low, low)) if _SIZE.fullmatch(size)]
    ordered = len(sizes) == len(("low", "high")) and sizes[0] <= sizes[1] <= _MAX_SIZE
    return Dim(*sizes) if ordered else None


def _format_dim(dim: Dim) -> str:
    if dim.is_fixed:
        return str(dim.low)
    return "-1" if dim == ANY_SIZE else f"{dim.low}:{dim.high}"
