"""Cells of the matrix: combinations of model, settings, interface, concurrency and neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

__all__ = [
    "BRIEF",
    "CONCURRENCIES",
    "FULL",
    "HINTS",
    "INTERFACES",
    "MIDDLE",
    "QUICK",
    "SIZES",
    "Cell",
    "Hint",
    "Interface",
    "ModelCase",
]

Interface = Literal["gRPC", "REST JSON", "REST binary", "shared memory"]
Hint = Literal["LATENCY", "THROUGHPUT", "default"]

SIZES: Final = {"10 us": 10e-6, "100 us": 100e-6, "1 ms": 1e-3, "10 ms": 10e-3, "75 ms": 75e-3}
"""Approximate time of one inference in seconds."""
_BETWEEN: Final = {"60 us of convolutions": 60e-6, "150 us of convolutions": 150e-6, "450 us of convolutions": 450e-6}
"""Approximate times of models between the matrix's sizes, with few weights."""
INTERFACES: Final[tuple[Interface, ...]] = ("gRPC", "REST JSON", "REST binary", "shared memory")
HINTS: Final[tuple[Hint, ...]] = ("LATENCY", "THROUGHPUT", "default")
CONCURRENCIES: Final = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model as it is served.

    Attributes:
        size: one of :data:`SIZES`, or of those between.
        is_dynamic: whether its batch is open.
        hint: its ``PERFORMANCE_HINT``; ``default`` for none.
        neighbours: how many other models the server has, which get no calls.
    """

    size: str
    is_dynamic: bool
    hint: Hint
    neighbours: int

    @property
    def seconds(self) -> float:
        """Return the approximate time of one inference."""
        return (SIZES | _BETWEEN)[self.size]

    @property
    def settings(self) -> dict[str, str]:
        """Return the compile settings for the server and for OpenVINO alone."""
        chosen = {} if self.hint == "default" else {"PERFORMANCE_HINT": self.hint}
        return {"INFERENCE_PRECISION_HINT": "f32", **chosen}

    def __str__(self) -> str:
        shape = "dynamic" if self.is_dynamic else "fixed"
        return f"{self.size}, {shape}, {self.hint}, {'beside four' if self.neighbours else 'alone'}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A model, called over an interface with a concurrency."""

    model: ModelCase
    interface: Interface
    concurrency: int

    def __str__(self) -> str:
        return f"{self.model}, {self.interface}, {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Grid:
    """A part of the matrix.

    Attributes:
        models: the served models, each in a separate server.
        interfaces: the interfaces.
        concurrencies: the numbers of concurrent calls.
        rounds: how often all cells of a server are measured in turn.
        seconds: the minimum duration of a cell in a round.
    """

    models: tuple[ModelCase, ...]
    interfaces: tuple[Interface, ...]
    concurrencies: tuple[int, ...]
    rounds: int
    seconds: float


FULL: Final = Grid(
    tuple(ModelCase(*each) for each in product(SIZES, (False, True), HINTS, (0, 4))), INTERFACES, CONCURRENCIES, 3, 1.0
)
_QUICK_HINTS: Final[tuple[Hint, ...]] = ("LATENCY", "default")
QUICK: Final = Grid(
    tuple(ModelCase(*each, 0) for each in product(("10 us", "1 ms", "10 ms"), (False, True), _QUICK_HINTS)),
    INTERFACES,
    (8,),
    3,
    0.6,
)
"""Grid to see the effect of a change, in less than five minutes."""
BRIEF: Final = Grid(
    tuple(ModelCase(size, is_dynamic, "default", 0) for size in SIZES for is_dynamic in (False, True)),
    ("gRPC",),
    (8,),
    5,
    1.0,
)
"""Grid of every size and shape with one setting and more rounds, in less than ten minutes, for interim records."""
MIDDLE: Final = Grid(
    tuple(ModelCase(size, True, hint, 0) for size in (*_BETWEEN, "100 us") for hint in HINTS),
    ("gRPC",),
    CONCURRENCIES,
    5,
    0.8,
)
"""Grid of models of some hundred microseconds, where the choice of thread or event loop is close."""
