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


async def test_other_verbs_are_not_batched(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    async with opened(tmp_path, BATCHED, batching(3)) as handler:
        assert await handler.call("handle_get", query_params="x") == "x"
        assert [handler.methods[name].is_batched for name in ("handle_post", "handle_get")] == [True, False]


async def test_a_request_whose_caller_leaves_is_removed_from_its_batch(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with opened(tmp_path, BATCHED, batching(3)) as handler:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(handler.call, "handle_post", payload="a", query_params=""))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert await post_all(handler, "b", "c") == ["b q0", "c q1"]
        assert handler.instance.batches == [["b", "c"]]


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


async def test_an_exception_among_the_results_fails_its_request(tmp_path: Path) -> None:
    code = """
        from ovmstrio.handlers import HTTPError
        class Handler:
            def handle_post(self, payload):
                return [ValueError("bad leaf"), payload[1], HTTPError(404, "no such leaf"), (payload[3], print)]
        """
    async with opened(tmp_path, code, batching(4)) as handler:
        outcomes = await post_all(handler, 1, 2, 3, 4)
    assert (outcomes[0].status_code, outcomes[0].detail) == (500, "bad leaf")
    assert outcomes[1] == 2
    assert (outcomes[2].status_code, outcomes[2].detail) == (404, "no such leaf")
    assert outcomes[3] == (4, print)


async def test_every_client_of_many_gets_its_own_result(tmp_path: Path) -> None:
    code = """
        import threading
        class Handler:
            def __init__(self):
                self.seen = []
                self.lock = threading.Lock()
            def handle_post(self, payload):
                with self.lock:
                    self.seen.extend(payload)
                return [each * 2 for each in payload]
        """
    text = batching(16, 0.01) + "threads_per_process: 4\n"
    async with opened(tmp_path, code, text) as handler:

        async def client(number: int) -> None:
            for turn in range(8):
                payload = number * 100 + turn
                assert await handler.call("handle_post", payload=payload) == payload * 2

        async with trio.open_nursery() as nursery:
            for number in range(128):
                nursery.start_soon(client, number)
    seen = handler.instance.seen
    assert sorted(seen) == sorted(number * 100 + turn for number in range(128) for turn in range(8))


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
