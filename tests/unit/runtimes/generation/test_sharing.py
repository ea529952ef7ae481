from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ovmstrio.core.engine_sharing import PartedAnswer
from ovmstrio.core.errors import ModelFailure, NotReady
from ovmstrio.runtimes.generation.sharing.asking import TEXTS
from ovmstrio.runtimes.generation.sharing.remote_engine import RemoteEngine
from ovmstrio.runtimes.generation.sharing.shown_engine import ANSWERED, LEAVING, LOST, READY, ShownEngine
from ovmstrio.server.workers.engines import ASK_ENGINE, HEAR_ENGINE, WorkerEngines
from ovmstrio.server.workers.peers import Peers
from ovmstrio.work.processes import WorkerProcess

SECONDS = 600


class _Owner:
    """The process that has the engine, as another one sees it; see ``EngineSharing``."""

    row, rows = 1, 2

    def __init__(self) -> None:
        self.is_leaving = False
        self.ended = trio.Event()
        self.begun: list[Any] = []

    async def call(self, _: int, __: str, value: Any) -> Any:
        await trio.lowlevel.checkpoint()
        if self.is_leaving:
            return [LEAVING, None]
        self.begun.append(value)
        return [ANSWERED, "accepted"]

    async def listen(self, _: int, __: str, heard: Callable[[Any], None]) -> None:
        if self.is_leaving:
            raise NotReady("it is being closed")
        heard([READY, {}])
        await self.ended.wait()

    async def wait_change(self) -> None:
        await trio.sleep(1)


async def test_request_waits_while_its_owner_is_replaced(
    autojump_clock: MockClock,
) -> None:
    owner, lost = _Owner(), list[str]()
    engine = RemoteEngine(cast("Any", owner), 0, "m k", lambda _: None, lost.append)
    answers: list[Any] = []
    answered = trio.Event()

    async def ask() -> None:
        answers.append(await engine.call(["add", 3, {"n": 1}]))
        answered.set()

    with trio.fail_after(SECONDS):
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            owner.is_leaving = True
            nursery.start_soon(ask)
            await trio.sleep(5)
            owner.ended.set()
            await trio.sleep(5)
            assert (answers, engine.obstacle != "") == ([], True)
            owner.is_leaving, owner.ended = False, trio.Event()
            await answered.wait()
            nursery.cancel_scope.cancel()
    assert (answers, lost, len(owner.begun)) == (["accepted"], [], 1)


class _Process:
    """A process that has room at once, or never."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.told: list[Any] = []
        self._has_room = has_room

    async def call(self, _: Any) -> Any:
        if not self._has_room:
            await trio.sleep_forever()
        return ["accepted"]

    async def tell(self, value: Any) -> None:
        self.told.append(value)


class _Shown(ShownEngine):
    """An engine without a process of its own."""

    def __init__(self, process: _Process | None = None) -> None:
        self._process = process or _Process()
        sharing = cast("Any", _Owner())
        super().__init__(
            sharing, "m k", TEXTS, options={}, name="m", heard=lambda _: None, lost=lambda _: None, program="none"
        )
        self._loaded.set()

    async def ready(self) -> WorkerProcess:
        return cast("WorkerProcess", self._process)

    async def drop_all(self) -> None:
        self._dropped, dropped = trio.open_memory_channel[int](math.inf)
        await self._drop_all(dropped)


async def _told(session: PartedAnswer) -> list[str]:
    return [kind async for kind, _ in session]


async def test_owner_that_leaves_reports_requests_that_have_not_ended(autojump_clock: MockClock) -> None:
    for number, expected in ((2, [READY, LOST]), (None, [READY])):
        engine = _Shown()
        session = await engine.listen(0)
        if number is not None:
            assert await engine.call(0, ["add", number, {"n": 1}]) == [ANSWERED, ["accepted"]]
        with trio.fail_after(SECONDS):
            await engine.leave(5)
            assert await _told(session) == expected


async def test_requests_that_wait_for_room_end_with_their_worker() -> None:
    process = _Process(has_room=False)
    engine = _Shown(process)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.drop_all)
        session = await engine.listen(0)
        async with trio.open_nursery() as asking:
            for number in (2, 4):
                asking.start_soon(engine.call, 0, ["add", number, {"n": 1}])
            await trio.testing.wait_all_tasks_blocked()
            asking.cancel_scope.cancel()
        assert (engine.open, process.told) == (2, [])
        session.close()
        with trio.fail_after(SECONDS):
            await engine.idle()
        nursery.cancel_scope.cancel()
    assert sorted(process.told) == [["cancel", 2], ["cancel", 4]]


class _NoPeers:
    rows, row = 2, 0


class _Engine:
    """What answers with a name of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def call(self, _: int, __: Any) -> str:
        return self._name

    async def listen(self, _: int) -> str:
        return self._name

    async def leave(self, _: float) -> None:
        pass


def _engines() -> WorkerEngines:
    return WorkerEngines(cast("Peers", _NoPeers()))


async def test_worker_of_other_settings_gets_the_engine_of_the_owner(autojump_clock: MockClock) -> None:
    engines = _engines()
    old, new = cast("Any", _Engine("old")), cast("Any", _Engine("new"))
    with engines.shown("m 1", old), trio.fail_after(SECONDS):
        with pytest.raises(NotReady):
            await engines.answer(ASK_ENGINE, ["m 2", 1, []])
        with pytest.raises(NotReady):
            await engines.answer(HEAR_ENGINE, ["other 2", 1])
        assert await engines.answer(HEAR_ENGINE, ["m 2", 1]) == "old"
        with engines.shown("m 2", new):
            assert await engines.answer(ASK_ENGINE, ["m 2", 1, []]) == "old"
            assert await engines.answer(HEAR_ENGINE, ["m 2", 1]) == "new"
            assert await engines.answer(ASK_ENGINE, ["m 2", 1, []]) == "new"


async def test_failed_load_of_an_engine_is_reported_at_once(autojump_clock: MockClock) -> None:
    engines = _engines()
    engines.refuse("m 1", ModelFailure("no such weights"))
    with trio.fail_after(SECONDS):
        began = trio.current_time()
        with pytest.raises(ModelFailure, match="no such weights"):
            await engines.answer(HEAR_ENGINE, ["m 1", 1])
        assert trio.current_time() == began
        with engines.shown("m 1", cast("Any", _Engine("new"))):
            assert await engines.answer(HEAR_ENGINE, ["m 1", 1]) == "new"
        with pytest.raises(NotReady):
            await engines.answer(HEAR_ENGINE, ["m 1", 1])
