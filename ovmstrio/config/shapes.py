"""Shapes, batch sizes and layouts as OVMS writes them, once for a model or by tensor: ``(2:8,10)``, ``NHWC:NCHW``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from ovmstrio.config.findings import wrong
from ovmstrio.config.json_text import parse_json
from ovmstrio.config.located import InvalidSyntax
from ovmstrio.config.specs import BatchSpec, LayoutSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import ANY_SIZE, Dim

__all__ = [
    "by_tensor",
    "format_batch_size",
    "format_layout",
    "format_shape",
    "object_in_text",
    "parse_batch_size",
    "parse_layout",
    "parse_layouts",
    "parse_shape",
    "parse_shapes",
]

_T = TypeVar("_T")


def by_tensor(option: str, value: Any, parse: Callable[[str, str], _T]) -> dict[str, _T]:
    """Read an option that is a text, an object of texts, or a text that holds such an object (command line).

    Args:
        option: its name, for messages.
        value: what the user wrote.
        parse: reads one text; is given the option's name with that of the tensor, and the text.

    Returns:
        The settings by tensor name; one that was written without a name has the key ``""``.

    Raises:
        ConfigError: with every text that cannot be read.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = object_in_text(option, value)
    if isinstance(value, str):
        return {"": parse(option, value)}
    if not isinstance(value, Mapping):
        raise wrong(option, value, "a text, or an object with a text for each tensor")
    settings: dict[str, _T] = {}
    problems: list[Problem] = []
    for name, text in value.items():
        try:
            settings[name] = _parse_member(f"{option}.{name}", text, parse)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return settings


def object_in_text(option: str, text: str) -> dict[str, Any]:
    """Read an option of the command line that is a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        document = parse_json(text)
    except InvalidSyntax as error:
        raise wrong(option, text, "a JSON object", message=error.message, suggestion=error.suggestion) from None
    value = document.root.plain()
    if not isinstance(value, dict):
        raise wrong(option, text, "a JSON object")
    if document.repeated:
        raise wrong(option, text, "each key once", message=f"{document.repeated[0].path!r} is given twice")
    return value


def _parse_member(option: str, text: Any, parse: Callable[[str, str], _T]) -> _T:
    if not isinstance(text, str):
        raise wrong(option, text, "a text")
    return parse(option, text)


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


_LETTERS: Final = "NCHWD"
_FORM: Final = "letters of NCHWD, ? and ... such as NHWC or N..., or two layouts such as NHWC:NCHW"
_PART: Final = re.compile(rf"[{_LETTERS}?]*(?:\.\.\.)?[{_LETTERS}?]*")


def parse_layouts(value: Any) -> dict[str, LayoutSpec]:
    """Read the option ``layout``: one layout, or an object with that of each tensor.

    Raises:
        ConfigError: with every layout that cannot be read.
    """
    return by_tensor("layout", value, parse_layout)


def parse_layout(option: str, text: str) -> LayoutSpec:
    """Read one layout, in letters of either case.

    Raises:
        ConfigError: it has another form.
    """
    parts = _BLANKS.sub("", text).upper().split(":")
    if len(parts) > len(("tensor", "model")):
        raise wrong(option, text, _FORM, message="more than two layouts")
    for part in parts:
        if not part or not _PART.fullmatch(part):
            raise wrong(option, text, _FORM, message=f"{part!r} is no layout")
        twice = [letter for letter in _LETTERS if part.count(letter) > 1]
        if twice:
            raise wrong(option, text, _FORM, message=f"the layout {part} has {twice[0]} twice")
    return LayoutSpec(tensor=parts[0], model=parts[1] if len(parts) > 1 else None)


def format_layout(layout: LayoutSpec) -> str:
    """Write a layout as :func:`parse_layout` reads it."""
    return layout.tensor if layout.model is None else f"{layout.tensor}:{layout.model}"
