"""The option ``batching``: ``{"max_batch_size": 16, "batch_timeout_ms": 5}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from ovmstrio.config.by_tensor import object_in_text
from ovmstrio.config.documents import expected_by
from ovmstrio.config.findings import did_you_mean, shown, wrong
from ovmstrio.config.shapes import format_batch_size
from ovmstrio.config.specs import BatchingSpec, BatchSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError, Problem

__all__ = ["batching_contradictions", "parse_batching"]

_FORM: Final = 'an object such as {"max_batch_size": 16, "batch_timeout_ms": 5}'


def parse_batching(value: Any) -> BatchingSpec:
    """Read the option: an object, or a text that holds one (command line).

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    settings = object_in_text("batching", value) if isinstance(value, str) else value
    if not isinstance(settings, Mapping):
        raise wrong("batching", value, _FORM)
    try:
        return BatchingSpec.model_validate(dict(settings), strict=True)
    except ValidationError as error:
        raise ConfigError([_problem(fault) for fault in error.errors(include_url=False)]) from None


def batching_contradictions(fields: Mapping[str, Any]) -> list[Problem]:
    """Tell which of the settings that were read cannot be had with batching, by fields of ``ModelSpec``."""
    batching: BatchingSpec | None = fields.get("batching")
    if batching is None:
        return []
    problems: list[Problem] = []
    if fields.get("stateful", False):
        message = "requests of a stateful model cannot be joined, as each sequence has a state of its own"
        problems.append(Problem(message, path="batching", suggestion="leave batching or stateful out"))
    batch: BatchSpec | None = fields.get("batch")
    if batch is not None and not _takes(batch, batching.max_batch_size):
        problems.append(
            Problem(
                "the batch size does not take every batch that may be joined",
                path="batch_size",
                expected=f"1 to {batching.max_batch_size}, because of batching",
                found=format_batch_size(batch),
                suggestion="leave batch_size out",
            )
        )
    shapes: Mapping[str, ShapeSpec] = fields.get("shapes", {})
    if any(shape.auto for shape in shapes.values()):
        message = "a shape that follows each request cannot be had with batching"
        problems.append(Problem(message, path="shape", found="auto", suggestion="write -1 for sizes that differ"))
    return problems


def _takes(batch: BatchSpec, largest: int) -> bool:
    return batch.dim is not None and batch.dim.accepts(1) and batch.dim.accepts(largest)


def _problem(fault: Any) -> Problem:
    key = str(fault["loc"][0])
    path = f"batching.{key}"
    if fault["type"] == "missing":
        return Problem(f"the key {key!r} is missing", path="batching", suggestion="add it")
    if fault["type"] == "extra_forbidden":
        known = f"known are {', '.join(BatchingSpec.model_fields)}"
        return Problem(
            f"unknown key {key!r}",
            path=path,
            suggestion=did_you_mean(key, BatchingSpec.model_fields, otherwise=known),
        )
    return Problem("the value cannot be used", path=path, expected=expected_by(fault), found=shown(fault["input"]))
