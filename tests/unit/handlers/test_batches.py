"""Requests that are gathered to one call of ``handle_post``."""

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
from tests.support.projects import opened

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
    """Write the section of the project."""
    return f"server_side_batching: {{max_batch_size: {size}, batch_interval_seconds: {seconds}}}\n"


async def outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    """Give what a call returns or raises."""
    try:
        return await call()
    except (UserCodeError, HTTPError) as error:
        return error


async def post_all(handler: LoadedHandler, *payloads: Any) -> list[Any]:
    """Post several payloads at once, and give their outcomes in the same order."""
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
    """Five with a size of three are a full batch at once, and the rest when the interval has passed."""
    async with opened(tmp_path, BATCHED, batching(3)) as handler:
        began = trio.current_time()
        assert await post_all(handler, *"abcde") == [f"{each} q{n}" for n, each in enumerate("abcde")]
        assert trio.current_time() - began == pytest.approx(0.5, abs=0.01)
        assert handler.instance.batches == [["a", "b", "c"], ["d", "e"]]


async def test_other_verbs_are_not_gathered(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """They get single arguments, at once."""
    async with opened(tmp_path, BATCHED, batching(3)) as handler:
        assert await handler.call("handle_get", query_params="x") == "x"
        assert [handler.methods[name].is_batched for name in ("handle_post", "handle_get")] == [True, False]


async def test_who_leaves_before_the_batch_begins_is_not_in_it(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """And takes no place in it."""
    async with opened(tmp_path, BATCHED, batching(3)) as handler, trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(_post_in, scope, handler)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        assert await post_all(handler, "b", "c") == ["b q0", "c q1"]
        assert handler.instance.batches == [["b", "c"]]


async def _post_in(scope: trio.CancelScope, handler: LoadedHandler) -> None:
    with scope:
        await handler.call("handle_post", payload="a", query_params="")


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
async def test_a_batch_that_fails_fails_for_all_of_it(tmp_path: Path, made: str, problem: str) -> None:
    """Nobody waits for ever, and the log has the reason once."""
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


@pytest.mark.parametrize("retry", [True, False])
async def test_requests_of_a_failed_batch_may_be_tried_one_by_one(tmp_path: Path, retry: bool) -> None:
    """If the project says so: then only those fail that are at fault, also if there were too few results."""
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
    text = batching(3).replace("}", f", retry_singly: {str(retry).lower()}}}")
    async with opened(tmp_path, code, text) as handler:
        outcomes = [*await post_all(handler, 2, 0, 1), *await post_all(handler, 2, 5, 1)]
    failed = [isinstance(each, UserCodeError) for each in outcomes]
    if retry:
        assert failed == [False, True, False] * 2
        assert [outcomes[n] for n in (0, 2, 3, 5)] == [5, 10, 5, 10]
        assert handler.instance.batches == [[2, 0, 1], [2], [0], [1], [2, 5, 1], [2], [5], [1]]
    else:
        assert all(failed)
        assert handler.instance.batches == [[2, 0, 1], [2, 5, 1]]


async def test_the_log_of_a_failed_batch_tells_of_its_requests(tmp_path: Path) -> None:
    """All of them, and none of another batch."""
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


async def test_an_exception_among_the_results_is_for_its_request_alone(tmp_path: Path) -> None:
    """Its text is sent, as it was put there to be seen; one with a status keeps it."""
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
    """None is lost and none comes twice, in threads, with several batches at once."""
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


async def test_what_waits_when_the_handler_ends_is_still_run(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """At once, without waiting for more."""
    outcomes: list[Any] = []

    async def post() -> None:
        outcomes.append(await handler.call("handle_post", payload="a", query_params="q"))

    async with trio.open_nursery() as nursery, opened(tmp_path, BATCHED, batching(3, 3600)) as handler:
        began = trio.current_time()
        nursery.start_soon(post)
        await trio.testing.wait_all_tasks_blocked()
    assert outcomes == ["a q"]
    assert trio.current_time() - began < 60


async def test_a_batch_that_does_not_end_keeps_no_handler_open(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Its requests are told so."""
    code = """
        import trio
        class Handler:
            async def handle_post(self, payload):
                await trio.sleep(3600)
        """
    outcomes: list[Any] = []

    async def post() -> None:
        with pytest.raises(NotReady):
            await handler.call("handle_post", payload=1)
        outcomes.append(trio.current_time() - began)

    began = trio.current_time()
    async with trio.open_nursery() as nursery, opened(tmp_path, code, batching(1)) as handler:
        nursery.start_soon(post)
        await trio.testing.wait_all_tasks_blocked()
    assert outcomes[0] < 60
