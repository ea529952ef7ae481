from __future__ import annotations

import os
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from ovmstrio.core.errors import NotFound, NotReady, QueueTimeout, TooManyRequests, UserCodeError
from ovmstrio.core.limits import LocalLimit
from ovmstrio.ext.handlers import HTTPError
from ovmstrio.handlers.batches import log_request_ids
from ovmstrio.handlers.error_reporter import ErrorReporter
from ovmstrio.handlers.handler_loading import LoadedHandler
from ovmstrio.isolation.generators import CREDIT
from ovmstrio.workers.shared_state import ServiceLimit, SharedCounters, SharedState, WorkerWakeups
from tests.support.projects import opened
from tests.support.waits import WAIT_SECONDS, until_async

HELD = """
    import threading
    class Handler:
        def __init__(self):
            self.begun = []
            self.may_end = {}
        def handle_post(self, payload):
            self.begun.append(payload)
            self.may_end.setdefault(payload, threading.Event()).wait(60)
            return payload
    """
SEVEN = "class Handler:\n    def handle_get(self):\n        return 7\n"
PREFIXES = pytest.mark.parametrize("prefix", ["", "async "], ids=["plain", "async"])


def release(instance: Any, *payloads: int) -> None:
    for payload in payloads:
        instance.may_end.setdefault(payload, threading.Event()).set()


async def test_calls_run_in_order_in_as_many_threads_as_configured(tmp_path: Path) -> None:
    results: list[int] = []

    async def call(payload: int) -> None:
        results.append(await handler.call("handle_post", payload=payload))

    async with opened(tmp_path, HELD, "threads_per_process: 2\n") as handler, trio.open_nursery() as nursery:
        for payload in range(5):
            nursery.start_soon(call, payload)
            await trio.testing.wait_all_tasks_blocked()
        await until_async(lambda: len(handler.instance.begun) == 2)
        release(handler.instance, 1)
        await until_async(lambda: handler.instance.begun == [0, 1, 2])
        release(handler.instance, 0, 2, 3, 4)
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert handler.instance.begun[2:] == [2, 3, 4]


async def test_a_running_call_whose_caller_leaves_keeps_its_thread(tmp_path: Path) -> None:
    async with opened(tmp_path, HELD) as handler, trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def cancel() -> None:
            await until_async(lambda: handler.instance.begun == [0])
            scope.cancel()

        nursery.start_soon(cancel)
        with scope:
            await handler.call("handle_post", payload=0)
        assert scope.cancelled_caught
        nursery.start_soon(partial(handler.call, "handle_post", payload=1))
        with trio.move_on_after(0.05):
            await until_async(lambda: handler.instance.begun != [0])
        assert handler.instance.begun == [0]
        release(handler.instance, 0, 1)
    assert handler.instance.begun == [0, 1]


async def test_async_methods_run_on_the_loop(tmp_path: Path) -> None:
    code = """
        import threading, trio
        class Handler:
            left = 0
            async def handle_get(self, query_params):
                try:
                    await trio.sleep(query_params)
                finally:
                    self.left += 1
                return threading.get_ident()
        """
    async with opened(tmp_path, code) as handler:
        assert await handler.call("handle_get", query_params=0, headers=1) == threading.get_ident()
        with trio.move_on_after(0.01):
            await handler.call("handle_get", query_params=60)
        assert handler.instance.left == 2


async def test_a_coroutine_of_a_plain_method_is_awaited(tmp_path: Path) -> None:
    code = """
        class Handler:
            def handle_get(self):
                return self.later()
            async def later(self):
                return 7
        """
    async with opened(tmp_path, code) as handler:
        assert await handler.call("handle_get") == 7


@PREFIXES
async def test_an_exception_of_a_method_is_logged_once_and_hidden(tmp_path: Path, prefix: str) -> None:
    code = f"""\
        class Handler:
            {prefix}def handle_get(self):
                return self.deeper()
            def deeper(self):
                raise SystemExit("secret")
        """
    async with opened(tmp_path, code) as handler:
        with capture_logs() as logs, pytest.raises(UserCodeError) as caught:
            await handler.call("handle_get")
    assert str(caught.value) == "internal server error"
    assert caught.value.detail == "SystemExit: secret (handler.py:5)"
    (entry,) = logs
    assert (entry["log_level"], entry["method"], entry["error"]) == ("error", "handle_get", caught.value.detail)
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(entry["exc_info"][2])]
    assert frames == ["handle_get", "deeper"]


@pytest.mark.parametrize(
    ("raised", "error", "logged"),
    [
        ("HTTPError(422, 'no')", HTTPError, 0),
        ("ArithmeticError('no')", ArithmeticError, 0),
        ("NotFound('no')", NotFound, 1),
    ],
)
async def test_errors_for_clients_are_raised_unchanged(
    tmp_path: Path, raised: str, error: type[Exception], logged: int
) -> None:
    code = f"""
        from ovmstrio.core.errors import NotFound
        from ovmstrio.ext.handlers import HTTPError
        class Handler:
            def handle_get(self):
                raise {raised}
        """
    async with opened(tmp_path, code, error_reporter=ErrorReporter("p", tmp_path, (ArithmeticError,))) as handler:
        with capture_logs() as logs, pytest.raises(error, match="no"):
            await handler.call("handle_get")
    assert len(logs) == logged


async def test_exceptions_of_starlette_keep_their_status(tmp_path: Path) -> None:
    pytest.importorskip("starlette.exceptions")
    code = """
        from starlette.exceptions import HTTPException
        class Handler:
            def handle_get(self):
                raise HTTPException(418, "tea", {"X-Pot": "1"})
        """
    async with opened(tmp_path, code) as handler:
        with pytest.raises(HTTPError) as caught:
            await handler.call("handle_get")
    assert (caught.value.status_code, caught.value.detail) == (418, "tea")
    assert caught.value.headers == {"X-Pot": "1"}


async def test_callbacks_take_no_thread_from_requests(tmp_path: Path) -> None:
    order: list[Any] = []
    wait = threading.Event()

    async def on_loop() -> None:
        order.append(threading.get_ident())

    async with opened(tmp_path, SEVEN) as handler:
        with capture_logs() as logs:
            handler.run_after(())
            handler.run_after((lambda: wait.wait(WAIT_SECONDS), lambda: order.append("second"), lambda: 1 / 0, on_loop))
            assert await handler.call("handle_get") == 7
            assert order == []
            wait.set()
            await until_async(lambda: len(order) == 2)
    assert order == ["second", threading.get_ident()]
    assert [(entry["method"], entry["error"].partition(" (")[0]) for entry in logs] == [
        ("callback", "ZeroDivisionError: division by zero")
    ]


async def test_a_handler_ends_after_its_callbacks_and_takes_no_more(tmp_path: Path) -> None:
    done: list[int] = []
    wait = threading.Event()

    async def set_late() -> None:
        await trio.testing.wait_all_tasks_blocked()
        wait.set()

    async with trio.open_nursery() as nursery:
        async with opened(tmp_path, SEVEN) as handler:
            handler.run_after((partial(wait.wait, WAIT_SECONDS), partial(done.append, 1)))
            nursery.start_soon(set_late)
        assert done == [1]
    handler.run_after((partial(done.append, 2),))
    assert done == [1]


async def test_plain_code_runs_in_the_threads_of_the_handler(tmp_path: Path) -> None:
    code = """
        import threading
        class Handler:
            def handle_get(self):
                return threading.get_ident()
            def handle_put(self):
                yield threading.get_ident()
            async def handle_patch(self):
                yield threading.get_ident()
        """
    async with opened(tmp_path, code) as handler:
        thread = await handler.run_in_thread(threading.get_ident)
        assert await handler.call("handle_get") == thread
        assert [value async for value in await handler.iterate("handle_put", int)] == [thread]
        assert [value async for value in await handler.iterate("handle_patch", int)] == [threading.get_ident()]
        with pytest.raises(ZeroDivisionError):
            await handler.run_in_thread(lambda: 1 / 0)
        with pytest.raises(KeyError):
            await handler.call("handle_post")


# Calls that wait too long


@asynccontextmanager
async def one_call(folder: Path) -> AsyncIterator[tuple[LoadedHandler, trio.Nursery, list[int], Any]]:
    """Open a handler whose only thread runs call 1; yields its nursery, the results and the function that calls it."""
    results: list[int] = []

    async def call(payload: int) -> None:
        results.append(await handler.call("handle_post", payload=payload))

    async with opened(folder, HELD, queue_timeout=30) as handler, trio.open_nursery() as nursery:
        nursery.start_soon(call, 1)
        await until_async(lambda: handler.instance.begun == [1])
        yield handler, nursery, results, call


async def expect_queue_timeout(handler: LoadedHandler, payload: int, seconds: int) -> None:
    waited = f"no thread or process was free within {seconds} s .--queue-timeout.; try again later"
    with pytest.raises(QueueTimeout, match=waited) as caught:
        await handler.call("handle_post", payload=payload)
    assert caught.value.retry_after_seconds == seconds


async def test_a_call_that_waits_too_long_for_a_thread_is_refused(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    mock_clock.rate = 1
    async with one_call(tmp_path) as (handler, _, results, call):
        async with trio.open_nursery() as waiting:
            waiting.start_soon(expect_queue_timeout, handler, 2, 30)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(29)
            await trio.testing.wait_all_tasks_blocked()
            assert waiting.child_tasks
            mock_clock.jump(2)
        mock_clock.jump(1000)
        release(handler.instance, 1, 3)
        await until_async(lambda: results == [1])
        await call(3)
    assert results == handler.instance.begun == [1, 3]


async def test_a_call_that_gets_a_thread_in_time_may_run_long(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    mock_clock.rate = 1
    async with one_call(tmp_path) as (handler, nursery, results, call):
        nursery.start_soon(call, 2)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(29)
        release(handler.instance, 1)
        await until_async(lambda: handler.instance.begun == [1, 2])
        mock_clock.jump(1000)
        await trio.testing.wait_all_tasks_blocked()
        release(handler.instance, 2)
    assert results == [1, 2]


async def test_the_time_in_which_a_batch_fills_is_not_queue_time(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    mock_clock.rate = 1
    code = """
        import threading
        class Handler:
            def __init__(self):
                self.begun = []
                self.may_end = threading.Event()
            def handle_post(self, payload):
                self.begun.append(payload)
                self.may_end.wait(60)
                return payload
        """
    text = "server_side_batching:\n  max_batch_size: 2\n  batch_interval_seconds: 10\n"
    async with opened(tmp_path, code, text, queue_timeout=20) as handler, trio.open_nursery() as nursery:
        for payload in (1, 2):
            nursery.start_soon(partial(handler.call, "handle_post", payload=payload))
        await until_async(lambda: handler.instance.begun != [])
        async with trio.open_nursery() as waiting:
            waiting.start_soon(expect_queue_timeout, handler, 3, 30)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(31)
        handler.instance.may_end.set()
    assert [sorted(batch) for batch in handler.instance.begun] == [[1, 2]]


# Limits of requests in flight


@pytest.fixture
def board() -> Iterator[SharedState]:
    made = SharedState.create(3)
    yield made
    made.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.descriptor)


def test_without_a_limit_any_number_of_requests_is_taken() -> None:
    limit = LocalLimit(0)
    for _ in range(1000):
        limit.acquire()
    assert limit.in_flight == 1000


def test_processes_share_one_limit(board: SharedState) -> None:
    counters = [SharedCounters(board, row, WorkerWakeups("secret", row)) for row in range(2)]
    first, second = (ServiceLimit(each, "p", 2) for each in counters)
    first.acquire()
    second.acquire()
    for limit in (first, second):
        with pytest.raises(TooManyRequests):
            limit.acquire()
    board.clear(0)
    second.acquire()
    with pytest.raises(TooManyRequests):
        first.acquire()


def test_a_server_is_ready_if_all_its_processes_are(board: SharedState) -> None:
    board.set_ready(0)
    board.set_ready(1)
    assert not board.all_ready()
    board.set_ready(2)
    assert board.all_ready()
    board.clear(1)
    assert not board.all_ready()
    board.set_ready(1)
    board.set_draining()
    assert not board.all_ready()


# Streams

NUMBERS = """
    class Handler:
        made = 0
        closed = False
        {prefix}def handle_get(self, query_params):
            try:
                while self.made < query_params:
                    self.made += 1
                    yield self.made
                raise ValueError("no more")
            finally:
                self.closed = True
    """


async def first(stream: Any, count: int) -> list[Any]:
    return [await anext(stream) for _ in range(count)]


@PREFIXES
async def test_values_and_errors_of_a_generator(tmp_path: Path, prefix: str) -> None:
    async with opened(tmp_path, NUMBERS.format(prefix=prefix)) as handler:
        stream = await handler.iterate("handle_get", int, query_params=100)
        assert await first(stream, 100) == list(range(1, 101))
        with capture_logs() as logs, pytest.raises(UserCodeError) as caught:
            await anext(stream)
        assert caught.value.detail == "ValueError: no more (handler.py:10)"
        assert len(logs) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()


async def test_a_generator_runs_a_bounded_number_of_values_ahead(tmp_path: Path) -> None:
    async with opened(tmp_path, NUMBERS.format(prefix="")) as handler:
        stream = await handler.iterate("handle_get", int, query_params=10**9)
        assert await first(stream, 1) == [1]
        await until_async(lambda: handler.instance.made >= CREDIT)
        assert await handler.run_in_thread(lambda: 7) == 7
        assert handler.instance.made <= CREDIT + 1
        await stream.aclose()
        await until_async(lambda: handler.instance.closed)


@PREFIXES
async def test_a_generator_is_closed_when_its_caller_leaves(tmp_path: Path, prefix: str) -> None:
    async with opened(tmp_path, NUMBERS.format(prefix=prefix)) as handler:
        stream = await handler.iterate("handle_get", int, query_params=10**9)
        await first(stream, 3)
        await stream.aclose()
        await stream.aclose()
        await until_async(lambda: handler.instance.closed)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_caller_that_leaves_does_not_wait_for_a_running_step(tmp_path: Path) -> None:
    code = """
        import threading
        class Handler:
            def __init__(self):
                self.begun = threading.Event()
                self.wait = threading.Event()
                self.closed = threading.Event()
            def handle_get(self):
                try:
                    self.begun.set()
                    self.wait.wait(60)
                    yield 1
                finally:
                    self.closed.set()
        """
    async with opened(tmp_path, code) as handler:
        instance: Any = handler.instance
        stream = await handler.iterate("handle_get", int)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.__anext__)
            await until_async(instance.begun.is_set)
            nursery.cancel_scope.cancel()
        await stream.aclose()
        assert not instance.closed.is_set()
        instance.wait.set()
        await until_async(instance.closed.is_set)


async def test_any_iterable_is_a_stream(tmp_path: Path) -> None:
    code = """
        class Handler:
            def handle_get(self):
                return [1, 2]
            def handle_put(self):
                return 7
        """
    async with opened(tmp_path, code) as handler:
        assert [value async for value in await handler.iterate("handle_get", int)] == [1, 2]
        with pytest.raises(UserCodeError) as caught:
            await handler.iterate("handle_put", int)
        assert "got int" in caught.value.detail


async def test_a_generator_whose_closing_fails_is_logged(tmp_path: Path) -> None:
    code = """
        class Handler:
            async def handle_get(self):
                try:
                    yield 1
                finally:
                    raise ValueError("while closing")
        """
    async with opened(tmp_path, code) as handler:
        stream = await handler.iterate("handle_get", int)
        await anext(stream)
        with capture_logs() as logs:
            await stream.aclose()
    assert [entry["error"] for entry in logs] == ["ValueError: while closing (handler.py:7)"]


async def test_models_are_leased_to_the_end_of_a_stream(tmp_path: Path) -> None:
    code = """
        from ovmstrio.handlers.models.model_cache import current_leases
        class Handler:
            released = 0
            def handle_get(self, query_params):
                current_leases().hold("model", self.release)
                for number in range(query_params):
                    yield number
            def release(self, held):
                self.released += 1
        """
    async with opened(tmp_path, code) as handler:
        stream = await handler.iterate("handle_get", int, query_params=10**9)
        await first(stream, 100)
        assert handler.instance.released == 0
        await stream.aclose()
        assert handler.instance.released == 1
        assert [value async for value in await handler.iterate("handle_get", int, query_params=3)] == [0, 1, 2]
        assert handler.instance.released == 2


@PREFIXES
async def test_a_value_that_cannot_be_converted_closes_the_generator(tmp_path: Path, prefix: str) -> None:
    def refuse(value: int) -> int:
        if value == 2:
            raise UserCodeError("wrong", detail="wrong")
        return value

    async with opened(tmp_path, NUMBERS.format(prefix=prefix)) as handler:
        stream = await handler.iterate("handle_get", refuse, query_params=10**9)
        with capture_logs():
            assert await anext(stream) == 1
            with pytest.raises(UserCodeError):
                await anext(stream)
        assert handler.instance.closed
        await stream.aclose()


# Batches


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
        ("payload[:-1]", "expected a list of 2 results, one for each request, got 1"),
        ("payload * 2", "got 4"),
        ("tuple(payload)", "got tuple"),
        ("None", "got NoneType"),
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
            with log_request_ids(request_id):
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
