"""The option ``shape_buckets``: up to which sizes the open dimensions of a model's inputs are padded.

::

    {"batch": [1, 4, 16], "words": {"sizes": [32, 64], "inputs": {"ids": 1}}} ── parse_shape_buckets ──> by dimension
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from ovmstrio.config.documents import expected_by
from ovmstrio.config.findings import did_you_mean, shown, wrong
from ovmstrio.config.shapes import object_in_text
from ovmstrio.config.specs import BatchingSpec, BatchSpec, BucketedDimension, ShapeSpec
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["OPTION", "bucket_contradictions", "parse_shape_buckets"]

OPTION: Final = "shape_buckets"
_FORM: Final = 'an object such as {"batch": [1, 4, 16]} or {"words": {"sizes": [32, 64], "inputs": {"ids": 1}}}'
_AXES: Final = ("inputs", "outputs")
_LENGTHS: Final = {"too_short": "a list that is not empty", "too_long": "no more than 64 sizes"}


def parse_shape_buckets(value: Any) -> dict[str, BucketedDimension]:
    """Read the option: an object with the buckets of each dimension, or a text that holds one (command line).

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    dimensions = object_in_text(OPTION, value) if isinstance(value, str) else value
    if not isinstance(dimensions, Mapping):
        raise wrong(OPTION, value, _FORM)
    found: dict[str, BucketedDimension] = {}
    problems: list[Problem] = []
    for name, settings in dimensions.items():
        try:
            found[name] = _parse_dimension(f"{OPTION}.{name}", settings)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _parse_dimension(path: str, settings: Any) -> BucketedDimension:
    given = {"sizes": settings} if isinstance(settings, list) else settings
    if not isinstance(given, Mapping):
        raise wrong(path, settings, 'a list of sizes such as [1, 4, 16], or an object with "sizes"')
    spread = {key: _spread(each) if key in _AXES else each for key, each in given.items()}
    try:
        # Lists are no tuples for those who read Python strictly, and they are for those who read JSON.
        return BucketedDimension.model_validate_json(json.dumps(spread, default=str), strict=True)
    except ValidationError as error:
        # What is wrong inside of a list makes the list wrong as well.
        by_path = {each.path: each for each in (_problem(path, fault) for fault in reversed(error.errors()))}
        raise ConfigError([*by_path.values()][::-1]) from None


def _spread(axes: Any) -> Any:
    """Give a list of dimensions for each tensor, where one may stand for itself."""
    if not isinstance(axes, Mapping):
        return axes
    return {name: each if isinstance(each, list) else [each] for name, each in axes.items()}


def _problem(path: str, fault: Any) -> Problem:
    place = ".".join([path, *(str(step) for step in fault["loc"] if isinstance(step, str))])
    key = str(fault["loc"][-1]) if fault["loc"] else ""
    if fault["type"] == "missing":
        return Problem(f"the key {key!r} is missing", path=path, suggestion="add it")
    if fault["type"] == "extra_forbidden":
        known = BucketedDimension.model_fields
        hint = did_you_mean(key, known, otherwise=f"known are {', '.join(known)}")
        return Problem(f"unknown key {key!r}", path=place, suggestion=hint)
    if fault["type"] == "value_error":
        expected = "each size larger than the one before"
        return Problem(str(fault["ctx"]["error"]), path=place, expected=expected, found=shown(fault["input"]))
    expected = _LENGTHS.get(fault["type"]) or expected_by(fault)
    return Problem("the value cannot be used", path=place, expected=expected, found=shown(fault["input"]))


def bucket_contradictions(fields: Mapping[str, Any]) -> list[Problem]:
    """Tell which of the settings that were read cannot be had with buckets, by fields of ``ModelSpec``."""
    buckets: Mapping[str, BucketedDimension] = fields.get(OPTION, {})
    if not buckets:
        return []
    problems = [*_of_the_model(fields), *_shared(buckets)]
    batching: BatchingSpec | None = fields.get("batching")
    for name, dimension in buckets.items():
        if dimension.inputs or batching is None or dimension.larger == "run":
            continue
        if batching.max_batch_size > dimension.sizes[-1]:
            message = "batches may be larger than the largest bucket, and would be refused"
            expected = f"a last size of {batching.max_batch_size} or more, because of batching"
            found = str(dimension.sizes[-1])
            problems.append(Problem(message, path=f"{OPTION}.{name}.sizes", expected=expected, found=found))
    return problems


def _of_the_model(fields: Mapping[str, Any]) -> list[Problem]:
    problems: list[Problem] = []
    if fields.get("stateful", False):
        message = "a stateful model would keep in its state what was padded"
        problems.append(Problem(message, path=OPTION, suggestion="leave shape_buckets or stateful out"))
    shapes: Mapping[str, ShapeSpec] = fields.get("shapes", {})
    batch: BatchSpec | None = fields.get("batch")
    automatic = {"shape": any(shape.auto for shape in shapes.values()), "batch_size": batch is not None and batch.auto}
    message = "what follows each request cannot be had with shape_buckets"
    problems += [
        Problem(message, path=option, found="auto", suggestion="write -1 for sizes that differ")
        for option, is_auto in automatic.items()
        if is_auto
    ]
    return problems


def _shared(buckets: Mapping[str, BucketedDimension]) -> list[Problem]:
    """Tell which dimensions of inputs are in two of the buckets' dimensions."""
    problems: list[Problem] = []
    owners: dict[tuple[str, int], str] = {}
    for name, dimension in buckets.items():
        places = [(tensor, axis) for tensor, axes in dimension.inputs.items() for axis in axes]
        for place in places or [("", 0)]:
            owner = owners.setdefault(place, name)
            if owner == name:
                continue
            what = f"dimension {place[1]} of {place[0]!r}" if places else "the batch dimension, as it names no inputs,"
            message = f"{what} is in {owner!r} already"
            path = f"{OPTION}.{name}.inputs.{place[0]}" if places else f"{OPTION}.{name}"
            problems.append(Problem(message, path=path, suggestion='name other "inputs", or leave one of them out'))
    return problems
