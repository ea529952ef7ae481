from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from ovmstrio.core.errors import NotReady, UserCodeError
from ovmstrio.handlers import HTTPError
from ovmstrio.runtimes.handlers.batches import in_log
from ovmstrio.runtimes.handlers.handler import LoadedHandler
from tests.support.handlers import opened

BATCHED = """
    class Handler:
        def __init__(self):
            self.batches = []
        async def handle_post(self, payload, query_params):
            self.batches.append(list(payload))
            return [f"{each} {params}" for each, params in zip(payload, query_params, strict=True)]
        def handle_get(self, query_params):
            return query_params
    """


def batching(size: int, seconds: float = 0.5) -> str:
    return f"server_side_batching: {{max_batch_size: {size}, batch_interval_seconds: {seconds}}}\n"


async def outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a call returns or raises."""
    try:
        return await call()
    except (UserCodeError, HTTPError) as error:
        return error


async def post_all(handler: LoadedHandler, *payloads: Any) -> list[Any]:
    """Post several payloads at once, and return their outcomes in the same order."""
    outcomes: list[Any] = [None] * len(payloads)

    async def post(index: int, payload: Any) -> None:
        call = partial(handler.call, "handle_post", payload=payload, query_params=f"q{index}")
        outcomes[index] = await outcome(call)

    async with trio.open_nursery() as nursery:
        for index, payload in enumerate(payloads):
            nursery.start_soon(post, index, payload)
            await trio.testing.wait_all_tasks_blocked()
    return outcomes


async def test_requests_share_calls_and_get_their_own_results(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(tmp_path, BATCHED, batching(3)) as handler:
        began = trio.current_time()
        assert await post_all(handler, *"abcde") == [f"{each} q{n}" for n, each in enumerate("abcde")]
        assert trio.current_time() - began == pytest.approx(0.5, abs=0.01)
        assert handler.instance.batches == [["a", "b", "c"], ["d", "e"]]


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("payload[:-1]", "expected a list of 2 results, one for each request in its order, found 1"),
        ("payload * 2", "found 4"),
        ("tuple(payload)", "found a tuple"),
        ("None", "found a NoneType"),
        ("1 / 0", "ZeroDivisionError: division by zero (handler.py:4)"),
    ],
)
async def test_a_failed_batch_fails_for_each_of_its_requests(tmp_path: Path, made: str, problem: str) -> None:
    code = f"""
        class Handler:
            def handle_post(self, payload):
                return {made}
        """
    async with opened(tmp_path, code, batching(2)) as handler:
        with capture_logs() as logs:
            outcomes = await post_all(handler, 1, 2)
    assert [type(each) for each in outcomes] == [UserCodeError, UserCodeError]
    assert [str(each) for each in outcomes] == ["internal server error"] * 2
    assert all(problem in each.detail for each in outcomes)
    assert len(logs) == 1


@pytest.mark.parametrize(
    ("retry", "results", "batches"),
    [
        ("true", [5, None, 10] * 2, [[2, 0, 1], [2], [0], [1], [2, 5, 1], [2], [5], [1]]),
        ("false", [None] * 6, [[2, 0, 1], [2, 5, 1]]),
    ],
)
async def test_requests_of_a_failed_batch_may_be_retried_one_by_one(
    tmp_path: Path, retry: str, results: list[int | None], batches: list[list[int]]
) -> None:
    code = """
        class Handler:
            def __init__(self):
                self.batches = []
            def handle_post(self, payload):
                self.batches.append(list(payload))
                if 0 in payload:
                    return [10 // each for each in payload]
                return [10 // each for each in payload if each != 5]
        """
    async with opened(tmp_path, code, batching(3).replace("}", f", retry_singly: {retry}}}")) as handler:
        outcomes = [*await post_all(handler, 2, 0, 1), *await post_all(handler, 2, 5, 1)]
    assert [None if isinstance(each, UserCodeError) else each for each in outcomes] == results
    assert handler.instance.batches == batches


async def test_the_log_of_a_failed_batch_has_the_ids_of_its_requests(tmp_path: Path) -> None:
    code = """
        class Handler:
            def handle_post(self, payload):
                raise ValueError
        """
    async with opened(tmp_path, code, batching(2)) as handler:

        async def post(request_id: str) -> None:
            with in_log(request_id):
                await outcome(partial(handler.call, "handle_post", payload=1))

        with capture_logs([merge_contextvars]) as logs:
            for pair in (["a", "b"], ["c", "d"]):
                async with trio.open_nursery() as nursery:
                    for request_id in pair:
                        nursery.start_soon(post, request_id)
                        await trio.testing.wait_all_tasks_blocked()
    assert [line["request_id"] for line in logs] == ["a, b", "c, d"]


async def test_a_waiting_batch_runs_when_the_handler_ends(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    outcomes: list[Any] = []

    async def post() -> None:
        outcomes.append(await handler.call("handle_post", payload="a", query_params="q"))

    async with trio.open_nursery() as nursery, opened(tmp_path, BATCHED, batching(3, 3600)) as handler:
        began = trio.current_time()
        nursery.start_soon(post)
        await trio.testing.wait_all_tasks_blocked()
    assert outcomes == ["a q"]
    assert trio.current_time() - began < 60


async def test_a_handler_ends_though_its_batch_does_not(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    code = """
        import trio
        class Handler:
            async def handle_post(self, payload):
                await trio.sleep(3600)
        """
    ended: list[float] = []

    async def post() -> None:
        with pytest.raises(NotReady):
            await handler.call("handle_post", payload=1)
        ended.append(trio.current_time() - began)

    began = trio.current_time()
    async with trio.open_nursery() as nursery, opened(tmp_path, code, batching(1)) as handler:
        nursery.start_soon(post)
        await trio.testing.wait_all_tasks_blocked()
    assert ended[0] < 60
