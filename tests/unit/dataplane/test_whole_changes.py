from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ModelFailure
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.dataplane.whole_changes import LoadsByName, control_of_all, make_change
from ovmstrio.registry import ModelControl
from tests.support.stub_registry import StubLoader, add_versions, registry_of, running

SECONDS = 60


class _Plane:
    """What has the control of one process, and knows the other one."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.loader = StubLoader()
        self.registry = registry_of(self.loader)
        self.control = ModelControl(self.registry, keeps_before=True)
        self.specs = [ModelSpec(name=name, base_path=folder / name) for name in names]
        self.siblings: _Peer | None = None

    def served(self) -> list[str]:
        return [name for name in self.registry.statuses() if self.registry.available_versions(name)]


class _Peer:
    """The other process."""

    def __init__(self, plane: _Plane) -> None:
        self._plane = plane
        self.is_slow = False

    async def ask_all(self, question: str, *arguments: Any, limit_seconds: float = 60) -> list[Any]:
        del limit_seconds
        if self.is_slow and question == "load":
            await trio.sleep_forever()
        return [await make_change(cast("DataPlane", self._plane), question, arguments)]

    async def in_turn(self, work: Callable[[], Awaitable[None]]) -> None:
        await work()


def _control(plane: _Plane) -> LoadsByName:
    made = control_of_all(cast("DataPlane", plane))
    assert made is not None
    return made


async def _apply(folder: Path, *planes: _Plane) -> None:
    for plane in planes:
        for spec in plane.specs:
            add_versions(folder / spec.name, 1)
        await plane.control.apply(plane.specs)


async def test_load_runs_in_all_processes_at_once_and_a_failure_undoes_it_in_all(tmp_path: Path) -> None:
    one, other = _Plane(tmp_path, "a", "b"), _Plane(tmp_path, "a", "b")
    one.siblings = _Peer(other)
    async with running(one.registry), running(other.registry):
        await _apply(tmp_path, one, other)
        gate = one.loader.hold("a", 1)

        async def open_gate() -> None:
            await other.loader.begun["a", 1].wait()
            gate.set()

        with trio.fail_after(SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_gate)
                await _control(one).load("a")
        assert (one.served(), other.served()) == (["a"], ["a"])
        for plane in (one, other):
            plane.loader.fail("b", 1)
            with pytest.raises(ModelFailure, match="told to fail"):
                await _control(one).load("b")
            assert (one.served(), other.served()) == (["a"], ["a"])
            plane.loader.mend("b", 1)


async def test_cancelled_load_undoes_nothing_else(tmp_path: Path) -> None:
    one, other = _Plane(tmp_path, "a", "b"), _Plane(tmp_path, "a", "b")
    one.siblings = _Peer(other)
    async with running(one.registry), running(other.registry):
        await _apply(tmp_path, one, other)
        await _control(one).load("a")
        one.siblings.is_slow = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_control(one).load, "b")
            with trio.fail_after(SECONDS):
                while "b" not in one.served():
                    await one.registry.wait_change()
            nursery.cancel_scope.cancel()
        assert (one.served(), other.served()) == (["a"], ["a"])
