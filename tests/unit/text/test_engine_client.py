from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing

from ovmstrio.core.generation import GenerationRequest
from ovmstrio.inference.engine.messages import ACCEPTED
from ovmstrio.text.engine_client import EngineClient, OutputChunk
from ovmstrio.text.text_metrics import TextMetrics
from tests.support.waits import WAIT_SECONDS

if TYPE_CHECKING:
    from ovmstrio.text.engine_client import AskedEngine

_FIGURES = [0.01, 2, 2, 0, 0.5, 0, 0, 0, 0]


class _AcceptingEngine:
    def __init__(self) -> None:
        self.notifications: list[Any] = []

    async def call(self, value: Any) -> Any:
        assert value[0] == "add"
        return [ACCEPTED, 3, "", 0, 0]

    async def notify(self, value: Any) -> None:
        self.notifications.append(value)


def _step(client: EngineClient, *rows: tuple[int, str], finish: int | None = None) -> None:
    client.hear([[[1, index, text, 1, [], finish] for index, text in rows], [], _FIGURES])


def _texts(chunks: Iterable[OutputChunk]) -> list[tuple[int, str]]:
    return [(chunk.index, chunk.text) for chunk in chunks]


class _Reader:
    """Task that reads one request of two texts, with a listener that ``refuses`` output or raises ``error``."""

    def __init__(self) -> None:
        self.client = EngineClient(TextMetrics("m"), count(1))
        self.engine = _AcceptingEngine()
        self.heard: list[list[tuple[int, str]]] = []
        self.read: list[tuple[int, str]] = []
        self.refuses = False
        self.error: Exception | None = None
        self.failure: Exception | None = None

    def _listen(self, chunks: Iterable[OutputChunk]) -> bool:
        if self.refuses:
            return False
        if self.error is not None:
            raise self.error
        self.heard.append(_texts(chunks))
        return True

    async def run(self) -> None:
        request = GenerationRequest("prompt", n=2)
        try:
            async with self.client.ask(cast("AskedEngine", self.engine), request) as accepted:
                accepted.answer.listener = self._listen
                while (made := await accepted.answer.take()) is not None:
                    self.read += _texts([made])
        except ZeroDivisionError as error:
            self.failure = error


@pytest.fixture
def reader() -> _Reader:
    return _Reader()


async def _deliver(reader: _Reader) -> None:
    reader.client.deliver()
    await trio.testing.wait_all_tasks_blocked()


async def test_a_listener_gets_all_new_texts_of_its_request_at_once(reader: _Reader) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run)
            await trio.testing.wait_all_tasks_blocked()
            _step(reader.client, (0, "a"), (1, "b"))
            _step(reader.client, (0, "c"))
            assert reader.heard == []
            reader.client.deliver()
            assert reader.heard == [[(0, "ac"), (1, "b")]]
            _step(reader.client, (0, "!"), (1, "?"), finish=0)
            await _deliver(reader)
    assert reader.heard == [[(0, "ac"), (1, "b")]]
    assert reader.read == [(0, "!"), (1, "?")]
    assert reader.engine.notifications == []


async def test_output_that_the_listener_refuses_is_read_by_the_task(reader: _Reader) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run)
            await trio.testing.wait_all_tasks_blocked()
            reader.refuses = True
            _step(reader.client, (0, "a"))
            reader.client.deliver()
            # The task has not run yet: later output must not overtake.
            reader.refuses = False
            _step(reader.client, (0, "b"))
            await _deliver(reader)
            assert (reader.heard, reader.read) == ([], [(0, "ab")])
            _step(reader.client, (0, "c"))
            await _deliver(reader)
            assert (reader.heard, reader.read) == ([[(0, "c")]], [(0, "ab")])
            nursery.cancel_scope.cancel()
    assert reader.engine.notifications == [["cancel", 1]]


async def test_an_error_of_the_listener_ends_its_request_only(reader: _Reader) -> None:
    with trio.fail_after(WAIT_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.run)
            await trio.testing.wait_all_tasks_blocked()
            reader.error = ZeroDivisionError()
            _step(reader.client, (0, "a"))
            await _deliver(reader)
    assert reader.failure is reader.error
    assert reader.engine.notifications == [["cancel", 1]]
    assert reader.client.open == 0


def test_steps_are_counted_when_metrics_are_read() -> None:
    metrics = TextMetrics("m")
    for _ in range(3):
        metrics.stepped(_FIGURES)
        metrics.generated(2, [0.01, 0.02])
    samples = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert samples["ovmstrio_llm_generation_tokens_total"] == 6
    assert samples["ovmstrio_llm_inter_token_latency_seconds_count"] == 6
    assert samples["ovmstrio_llm_step_seconds_count"] == 3
    assert samples["ovmstrio_llm_requests_running"] == 2
    for wrong in ([1.0], [*_FIGURES[:-1], "0"]):
        with pytest.raises((TypeError, ValueError)):
            metrics.stepped(cast("list[float]", wrong))
