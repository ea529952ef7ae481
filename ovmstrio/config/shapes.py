"""Shapes, batch sizes, layouts and shape buckets in OVMS's notation: ``(2:8,10)``, ``NHWC:NCHW``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from ovmstrio.config.documents import InvalidSyntax, invalid_value_error, member_path, parse_json
from ovmstrio.config.schema import parse_value
from ovmstrio.config.specs import BatchingSpec, BatchSpec, DimensionBuckets, LayoutSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tensor import ANY_SIZE, Dim

_T = TypeVar("_T")


def parse_by_tensor(option: str, value: Any, parse: Callable[[str, str], _T]) -> dict[str, _T]:
    """Parse an option that is a string, an object of strings, or JSON text of such an object (command line).

    Args:
        option: name for messages.
        value: the configured value.
        parse: parses one string; gets the option path and the string.

    Returns:
        Values by tensor name; ``""`` for a value without a name.

    Raises:
        ConfigError: invalid values, all of them.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json_object(option, value)
    if isinstance(value, str):
        return {"": parse(option, value)}
    if not isinstance(value, Mapping):
        raise invalid_value_error(option, value, "a text, or an object with a text for each tensor")
    settings: dict[str, _T] = {}
    problems: list[Problem] = []
    for name, text in value.items():
        try:
            settings[name] = _parse_member(member_path(option, name), text, parse)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return settings


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    """Parse a command-line option that is a JSON object; raises ConfigError if not an object."""
    try:
        document = parse_json(text)
    except InvalidSyntax as error:
        raise invalid_value_error(
            option, text, "a JSON object", message=error.message, suggestion=error.suggestion
        ) from None
    value = document.root.plain()
    if not isinstance(value, dict):
        raise invalid_value_error(option, text, "a JSON object")
    if document.repeated:
        raise invalid_value_error(option, text, "each key once", message=f"duplicate key {document.repeated[0].path!r}")
    return value


def _parse_member(option: str, text: Any, parse: Callable[[str, str], _T]) -> _T:
    if not isinstance(text, str):
        raise invalid_value_error(option, text, "a text")
    return parse(option, text)


_SIZE: Final = re.compile(r"[0-9]{1,19}", re.ASCII)
_WHITESPACE: Final = re.compile(r"[ \t\r\n]+")
_MAX_SIZE: Final = 2**63 - 1
_AUTO: Final = "auto"

_SHAPE_FORM: Final = "dimensions in parentheses such as (1,3,224,224), each a size, -1 for any or a range 2:8; or auto"
_BATCH_FORM: Final = "a size such as 8, -1 for any, a range such as 2:8, or auto"


def parse_shapes(value: Any) -> dict[str, ShapeSpec]:
    """Parse ``shape``: one shape, or an object by input; raises ConfigError with all invalid shapes."""
    return parse_by_tensor("shape", value, parse_shape)


def parse_shape(option: str, text: str) -> ShapeSpec:
    """Parse one shape; raises ConfigError if malformed."""
    compact = _WHITESPACE.sub("", text)
    if compact.lower() == _AUTO:
        return ShapeSpec(auto=True)
    if not (compact.startswith("(") and compact.endswith(")")):
        bracketed = re.fullmatch(r"\[?([0-9,:-]+)\]?", compact)
        raise invalid_value_error(option, text, _SHAPE_FORM, suggestion=f"write ({bracketed[1]})" if bracketed else "")
    inner = compact[1:-1].removesuffix(",")
    return ShapeSpec(dims=tuple(_dim(option, text, part) for part in inner.split(",")) if inner else ())


def parse_batch_size(value: Any) -> BatchSpec | None:
    """Parse ``batch_size``; None (``0``) is that of the model.

    Raises:
        ConfigError: malformed, as a warning: OVMS uses the model's batch size.
    """
    text = _WHITESPACE.sub("", str(value))
    if text.lower() == _AUTO:
        return BatchSpec(auto=True)
    dim = _read_dim(text)
    if dim is None or isinstance(value, bool):
        suggestion = "the model's own batch size is used"
        raise invalid_value_error("batch_size", value, _BATCH_FORM, suggestion=suggestion, severity="warning")
    return None if dim == Dim.fixed(0) else BatchSpec(dim=dim)


def format_batch_size(batch: BatchSpec | None) -> str:
    """Format a batch size as :func:`parse_batch_size` parses it."""
    if batch is None:
        return "0"
    return _AUTO if batch.dim is None else _format_dim(batch.dim)


def _dim(option: str, text: str, part: str) -> Dim:
    dim = _read_dim(part)
    if dim is None:
        raise invalid_value_error(option, text, _SHAPE_FORM, message=f"invalid dimension {part!r}")
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
_LAYOUT_FORM: Final = "letters of NCHWD, ? and ... such as NHWC or N..., or two layouts such as NHWC:NCHW"
_PART: Final = re.compile(rf"[{_LETTERS}?]*(?:\.\.\.)?[{_LETTERS}?]*")


def parse_layouts(value: Any) -> dict[str, LayoutSpec]:
    """Parse ``layout``: one layout, or an object by tensor; raises ConfigError with all invalid layouts."""
    return parse_by_tensor("layout", value, parse_layout)


def parse_layout(option: str, text: str) -> LayoutSpec:
    """Parse one layout; case-insensitive.

    Raises:
        ConfigError: malformed.
    """
    parts = _WHITESPACE.sub("", text).upper().split(":")
    if len(parts) > len(("tensor", "model")):
        raise invalid_value_error(option, text, _LAYOUT_FORM, message="more than two layouts")
    for part in parts:
        if not part or not _PART.fullmatch(part):
            raise invalid_value_error(option, text, _LAYOUT_FORM, message=f"invalid layout {part!r}")
        twice = [letter for letter in _LETTERS if part.count(letter) > 1]
        if twice:
            raise invalid_value_error(option, text, _LAYOUT_FORM, message=f"duplicate {twice[0]} in layout {part}")
    return LayoutSpec(tensor=parts[0], model=parts[1] if len(parts) > 1 else None)


# Shape buckets

SHAPE_BUCKETS: Final = "shape_buckets"
_BUCKETS_FORM: Final = 'an object such as {"batch": [1, 4, 16]} or {"words": {"sizes": [32, 64], "inputs": {"ids": 1}}}'


def parse_shape_buckets(value: Any) -> dict[str, DimensionBuckets]:
    """Parse ``shape_buckets``: an object by dimension, or JSON text (command line).

    Raises:
        ConfigError: malformed, with all problems.
    """
    dimensions = parse_json_object(SHAPE_BUCKETS, value) if isinstance(value, str) else value
    if not isinstance(dimensions, Mapping):
        raise invalid_value_error(SHAPE_BUCKETS, value, _BUCKETS_FORM)
    found: dict[str, DimensionBuckets] = {}
    problems: list[Problem] = []
    for name, settings in dimensions.items():
        try:
            found[name] = _parse_dimension(member_path(SHAPE_BUCKETS, name), settings)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _parse_dimension(path: str, settings: Any) -> DimensionBuckets:
    given = {"sizes": settings} if isinstance(settings, list) else settings
    if not isinstance(given, Mapping):
        raise invalid_value_error(path, settings, 'a list of sizes such as [1, 4, 16], or an object with "sizes"')
    return parse_value(path, given, DimensionBuckets)


def bucket_conflicts(fields: Mapping[str, Any]) -> list[Problem]:
    """Return conflicts of shape buckets with other settings, fields of ``ModelSpec``."""
    buckets: Mapping[str, DimensionBuckets] = fields.get(SHAPE_BUCKETS, {})
    if not buckets:
        return []
    problems = [*_model_conflicts(fields), *_shared_axes(buckets)]
    batching: BatchingSpec | None = fields.get("batching")
    for name, dimension in buckets.items():
        if dimension.inputs or batching is None or dimension.larger == "run":
            continue
        if batching.max_batch_size > dimension.sizes[-1]:
            message = "batching exceeds the largest bucket"
            expected = f"a last size of {batching.max_batch_size} or more"
            found = str(dimension.sizes[-1])
            problems.append(
                Problem(message, path=f"{member_path(SHAPE_BUCKETS, name)}.sizes", expected=expected, found=found)
            )
    return problems


def _model_conflicts(fields: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    if fields.get("stateful", False):
        message = "shape buckets are not supported for stateful models"
        problems.append(Problem(message, path=SHAPE_BUCKETS, suggestion="remove shape_buckets or stateful"))
    shapes: Mapping[str, ShapeSpec] = fields.get("shapes", {})
    batch: BatchSpec | None = fields.get("batch")
    automatic = {"shape": any(shape.auto for shape in shapes.values()), "batch_size": batch is not None and batch.auto}
    message = "auto is not supported with shape_buckets"
    problems += [
        Problem(message, path=option, found="auto", suggestion="use -1 for variable sizes")
        for option, is_auto in automatic.items()
        if is_auto
    ]
    return problems


def _shared_axes(buckets: Mapping[str, DimensionBuckets]) -> list[Problem]:
    problems: list[Problem] = []
    owners: dict[tuple[str, int], str] = {}
    for name, dimension in buckets.items():
        places = [(tensor, axis) for tensor, axes in dimension.inputs.items() for axis in axes]
        for place in places or [("", 0)]:
            owner = owners.setdefault(place, name)
            if owner == name:
                continue
            what = f"dimension {place[1]} of {place[0]!r}" if places else "the batch dimension, as it names no inputs,"
            message = f"{what} is already in {owner!r}"
            path = member_path(SHAPE_BUCKETS, name)
            path = member_path(f"{path}.inputs", place[0]) if places else path
            problems.append(Problem(message, path=path, suggestion='change "inputs", or remove one of them'))
    return problems
