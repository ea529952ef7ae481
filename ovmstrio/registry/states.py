"""What the registry tells of what it serves: states, readiness and the outcome of a change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

__all__ = ["OK", "ApplyResult", "Readiness", "VersionState", "VersionStatus"]

OK: Final = "OK"


class VersionState(IntEnum):
    """Where a version is in its life; the numbers are TensorFlow Serving's."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version at one moment.

    ``error_code`` is ``"OK"``, ``"UNKNOWN"`` (a model's load failed) or ``"FAILED_PRECONDITION"`` (a pipeline's
    or a graph's); ``reason`` says in words why it failed.  A version that is AVAILABLE with an error code serves what
    was loaded before the failure.  ``load_seconds`` is the time that the last load took, None before the first has
    ended, and ``grown_bytes`` by how much it made the process grow, None where that cannot be told.  ``kind`` is
    ``"model"``, ``"pipeline"`` or ``"graph"``.
    """

    name: str
    version: int
    state: VersionState
    error_code: str = OK
    reason: str = ""
    load_seconds: float | None = None
    kind: str = "model"
    grown_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests will be served, and if not, why."""

    ready: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """What one change of the registry came to.

    ``changed`` tells whether anything was loaded or retired.  A failure of a whole model, such as a path that does
    not exist, has version 0.
    """

    changed: bool = False
    failures: tuple[VersionStatus, ...] = ()
