from __future__ import annotations

import gzip
import random
import threading

import pytest
import trio
import trio.testing

from ovmstrio.api import refusals
from ovmstrio.api.refusals import inflated_body
from ovmstrio.core.errors import PayloadTooLarge
from ovmstrio.core.http import HttpRequest
from ovmstrio.core.inflation import Inflation
from tests.support.kept_by_errors import bytes_kept_by

NOISE = random.Random(1).randbytes(10_000)


def _request(body: bytes) -> HttpRequest:
    return HttpRequest("POST", "/", headers=(("content-encoding", "gzip"),), body=body)


async def test_only_large_bodies_are_inflated_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Noted(Inflation):
        def finish(self) -> bytes:
            threads.append(threading.get_ident())
            return super().finish()

    monkeypatch.setattr(refusals, "Inflation", Noted)
    for body in (b"small", NOISE):
        assert await inflated_body(_request(gzip.compress(body)), 2**20) == body
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


async def test_a_body_above_the_limit_is_refused() -> None:
    with pytest.raises(PayloadTooLarge, match="more than 9999 bytes"):
        await inflated_body(_request(gzip.compress(NOISE)), 9_999)


async def test_one_body_is_inflated_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, running = threading.Event(), threading.Semaphore(0)

    class Waiting(Inflation):
        def finish(self) -> bytes:
            running.release()
            gate.wait(20)
            return super().finish()

    monkeypatch.setattr(refusals, "Inflation", Waiting)
    body = gzip.compress(NOISE)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(inflated_body, _request(body), 2**20)
        assert await trio.to_thread.run_sync(running.acquire, True, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert not running.acquire(blocking=False)
        gate.set()


def test_a_refusal_does_not_keep_the_inflated_bytes() -> None:
    def refused() -> BaseException:
        with pytest.raises(PayloadTooLarge) as caught:
            trio.run(inflated_body, _request(gzip.compress(bytes(5 * 2**20))), 4 * 2**20)
        return caught.value

    assert bytes_kept_by(refused) < 2**19
