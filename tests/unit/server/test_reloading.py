"""Reloads of a server of several processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import trio

from ovmstrio.core.errors import ModelFailure
from ovmstrio.server.reloading import RELOAD, RESTORE, Reloading

SECONDS = 60


class _Process:
    def __init__(self, *, fails: bool = False) -> None:
        self.needs: list[_Process] = []
        self.begun = trio.Event()
        self.made: list[str] = []
        self._fails = fails

    async def reload(self) -> bool:
        await self._make("reload")
        if self._fails:
            raise ModelFailure("bad")
        return True

    async def restore(self) -> None:
        await self._make("restore")

    async def _make(self, what: str) -> None:
        self.begun.set()
        for each in self.needs:
            await each.begun.wait()
        self.made.append(what)
        # What comes next is begun anew.
        await trio.lowlevel.checkpoint()


class _Others:
    def __init__(self, other: _Process) -> None:
        self._other = other

    async def ask_all(self, question: str, *_: Any, limit_seconds: float = 60) -> list[Any]:
        assert limit_seconds > SECONDS
        return [await {RELOAD: self._other.reload, RESTORE: self._other.restore}[question]()]

    async def in_turn(self, work: Callable[[], Awaitable[bool]]) -> bool:
        return await work()


class _Notifier:
    reloading = nullcontext


def _reloading(here: _Process, other: _Process) -> Reloading:
    return Reloading(cast("Any", here), cast("Any", None), cast("Any", _Notifier()), cast("Any", _Others(other)))


async def test_no_process_is_first_for_it_may_need_what_another_one_loads() -> None:
    """As an engine of a model of text, which one process has for all."""
    here, other = _Process(), _Process()
    here.needs, other.needs = [other], [here]
    with trio.fail_after(SECONDS):
        assert await _reloading(here, other).reload()
    assert (here.made, other.made) == (["reload"], ["reload"])


@pytest.mark.parametrize("fails_here", [True, False])
async def test_all_go_back_where_one_fails(*, fails_here: bool) -> None:
    """Also to what they need of each other."""
    here, other = _Process(fails=fails_here), _Process(fails=not fails_here)
    here.needs, other.needs = [other], [here]
    with trio.fail_after(SECONDS), pytest.raises(ModelFailure, match="bad"):
        await _reloading(here, other).reload()
    assert (here.made, other.made) == (["reload", "restore"], ["reload", "restore"])
