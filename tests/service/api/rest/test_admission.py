"""Over REST a call that is one too many is refused at its head, and one that has to wait does so before its body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from ovmstrio.observability.metrics import Metrics
from tests.support.waits import WAIT_SECONDS
from tests.unit.api.rest.servers import BODY, Peer, Serving, infer_head, infer_post, serving_rest

_BLOCK = b'{"parameters":{"block":true},' + BODY[1:]


@asynccontextmanager
async def limited(folder: Path, most: int, queue: int) -> AsyncIterator[Serving]:
    """Serve ``echo`` with limits."""
    async with serving_rest(folder, metrics=Metrics()) as serving:
        limits = {"max_concurrency": most, "max_queue": queue}
        await serving.registry.apply([spec.model_copy(update=limits) for spec in serving.specs])
        yield serving


async def _wait_queued(serving: Serving, count: int) -> None:
    with trio.fail_after(10):
        queued = f'ovmstrio_queued_requests{{name="echo"}} {count}.0'.encode()
        while queued not in (serving.plane.render_metrics() or b""):
            await trio.testing.wait_all_tasks_blocked(0.01)


@pytest.mark.parametrize("extra", [(), ("Accept-Encoding: x", "TE: trailers")], ids=["fast lane", "application"])
async def test_a_call_beyond_the_queue_is_refused_at_its_head(tmp_path: Path, extra: tuple[str, ...]) -> None:
    """Its body has not come yet: the numbers, when to come again, and a connection that serves on."""
    async with limited(tmp_path, 1, 0) as serving, serving.connect() as first, serving.connect() as second:
        await first.send(infer_post(_BLOCK))
        await serving.wait_blocked()
        answer = await second.ask(infer_head(len(BODY), *extra))
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert answer.json == {
            "error": '"echo" has 1 calls under way and 0 waiting, and may have 1 (max_concurrency) and 0 (max_queue);'
            " try again in 1 s"
        }
        # Questions are no calls.
        assert (await serving.get("/v2/models/echo")).status_code == 200
        assert (await serving.get("/v2/health/ready")).status_code == 200
        if not extra:
            await second.send(BODY)
            assert (await second.ask(infer_post(model="none"))).status == 404
            await first.stream.aclose()
            with trio.fail_after(WAIT_SECONDS):
                await serving.servable.cancelled.wait()
            assert (await second.ask(infer_post())).status == 200
        metrics = (serving.plane.render_metrics() or b"").decode()
        assert 'ovmstrio_refused_requests_total{name="echo"} 1.0' in metrics
        assert (
            'ovmstrio_requests_total{api="KServe",code="Overloaded",interface="REST",method="ModelInfer",name="echo"'
            in (metrics)
        )


async def test_a_large_body_that_is_refused_ends_the_connection(tmp_path: Path) -> None:
    """The client that is still sending it reads the answer all the same."""
    async with limited(tmp_path, 1, 0) as serving, serving.connect() as first, serving.connect() as second:
        await first.send(infer_post(_BLOCK))
        await serving.wait_blocked()
        await second.send(infer_head(10 * 2**20) + b"." * 2**20)
        answer = await second.answer()
        assert (answer.status, answer.headers["connection"]) == (429, "close")


async def test_who_waits_is_answered_in_turn_and_leaves_with_its_client(tmp_path: Path) -> None:
    """Three wait with their bodies unread; one goes, the others are answered when the first one has ended."""
    async with limited(tmp_path, 1, 3) as serving, serving.connect() as first:
        await first.send(infer_post(_BLOCK))
        await serving.wait_blocked()
        peers = []
        async with trio.open_nursery() as nursery:
            for number in range(3):
                peers.append(await nursery.start(_connected, serving))
                await peers[-1].send(infer_post(BODY.replace(b"0.5", b"%d" % number)))
                await _wait_queued(serving, number + 1)
            assert 'ovmstrio_queued_requests{name="echo"} 3.0' in (serving.plane.render_metrics() or b"").decode()
            await peers[1].stream.aclose()
            await _wait_queued(serving, 2)
            assert len(serving.servable.requests) == 1
            await first.stream.aclose()
            assert [(await peers[number].answer()).json["outputs"][0]["data"][0] for number in (0, 2)] == [0, 2]
            nursery.cancel_scope.cancel()
        event = serving.servable.requests[-1].event
        assert event is not None
        assert 0 < event.queue_seconds <= event.seconds
        assert len(serving.servable.requests) == 3


async def _connected(serving: Serving, *, task_status: trio.TaskStatus[Peer]) -> None:
    async with serving.connect() as peer:
        task_status.started(peer)
        await trio.sleep_forever()
