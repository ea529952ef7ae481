"""Servables and loaders made by code, which notice when they are misused, and a registry that serves them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ModelFailure
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.registry import Registry
from ovmstrio.runtimes.kind import Kind, LoadContext
from ovmstrio.runtimes.table import KINDS, Kinds, table_of

Load = Callable[[Any, int, Path], Awaitable[Any]]
"""Makes a servable of a spec, a version and its directory."""


class StubServable:
    """Answers with its name and version; ``misuse`` notes calls after it was closed, and closing it wrongly."""

    def __init__(self, spec: ModelSpec, version: int) -> None:
        self.spec = spec
        self.version = version
        self.closed = 0
        self.running = 0
        self.misuse: list[str] = []
        self.metadata = ServableMetadata(spec.name, "Stub", (), ())

    async def infer(self, request: InferRequest) -> InferResponse:
        self.running += 1
        try:
            self._check(not self.closed, "called when closed")
            await trio.lowlevel.checkpoint()
            self._check(not self.closed, "closed during a call")
        finally:
            self.running -= 1
        return InferResponse(request.model_name, str(self.version), [])

    async def aclose(self) -> None:
        self.closed += 1
        self._check(self.closed == 1, "closed twice")
        self._check(not self.running, "closed under a call")
        await trio.lowlevel.checkpoint()

    def _check(self, fine: bool, misuse: str) -> None:
        if not fine:
            self.misuse.append(misuse)


class StubLoader:
    """Loads :class:`StubServable`; loads can be made to wait and to fail."""

    def __init__(self) -> None:
        self.opened: list[StubServable] = []
        self.attempts: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.failing: dict[tuple[str, int], Exception] = {}
        self.begun: defaultdict[tuple[str, int], trio.Event] = defaultdict(trio.Event)
        self.cancelled: list[tuple[str, int]] = []
        self.at_once = 0
        self.most_at_once = 0
        self._attempted = trio.Event()
        self._gates: dict[tuple[str, int], trio.Event] = {}

    def hold(self, name: str, version: int) -> trio.Event:
        self.begun.pop((name, version), None)
        return self._gates.setdefault((name, version), trio.Event())

    def fail(self, name: str, version: int, error: Exception | None = None) -> None:
        self.failing[name, version] = error or ModelFailure("the stub was told to fail")

    def mend(self, name: str, version: int) -> None:
        self.failing.pop((name, version), None)

    async def wait_attempts(self, count: int) -> None:
        while sum(self.attempts.values()) < count:
            await self._attempted.wait()

    async def __call__(self, spec: ModelSpec, version: int, directory: Path) -> StubServable:
        key = (spec.name, version)
        self._begin(key)
        try:
            if key in self._gates:
                await self._gates[key].wait()
            await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            self.cancelled.append(key)
            raise
        finally:
            self.at_once -= 1
        if key in self.failing:
            raise self.failing[key]
        servable = StubServable(spec, version)
        self.opened.append(servable)
        return servable

    def _begin(self, key: tuple[str, int]) -> None:
        self.attempts[key] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun[key].set()
        self._attempted.set()
        self._attempted = trio.Event()

    @property
    def misuse(self) -> list[str]:
        return [misuse for servable in self.opened for misuse in servable.misuse]

    @property
    def open_versions(self) -> list[tuple[str, int]]:
        return sorted((servable.spec.name, servable.version) for servable in self.opened if not servable.closed)


def add_versions(base: Path, *versions: int) -> Path:
    for version in versions:
        (base / str(version)).mkdir(parents=True, exist_ok=True)
    return base


def kinds_loaded_by(load: Load) -> Kinds:
    """Give the server's own kinds, with something else in the place of their loading."""

    def replaced(kind: Kind[Any]) -> Kind[Any]:
        async def load_(self: object, spec: Any, version: int, directory: Path, context: LoadContext) -> Any:
            del self, context
            return await load(spec, version, directory)

        adapted: Kind[Any] = type(f"Adapted{type(kind).__name__}", (type(kind),), {"load": load_})()
        return adapted

    return table_of(*map(replaced, KINDS.values()))


def registry_of(load: Load, **options: Any) -> Registry:
    """Make a registry of the server's own kinds, with something else in the place of their loading."""
    return Registry(kinds_loaded_by(load), **options)


@asynccontextmanager
async def running(registry: Registry) -> AsyncIterator[Registry]:
    async with trio.open_nursery() as nursery:
        await nursery.start(registry.run)
        yield registry
        nursery.cancel_scope.cancel()
