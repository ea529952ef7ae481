"""Calls of methods: threads, the event loop, errors, the end of callers."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.core.errors import NotFound, UserCodeError
from ovmstrio.handlers import HTTPError
from ovmstrio.runtimes.handlers.handler_code import HandlerCode
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


def let(instance: Any, *payloads: int) -> None:
    """Let calls end."""
    for payload in payloads:
        instance.may_end.setdefault(payload, threading.Event()).set()


async def test_as_many_calls_run_at_once_as_there_are_threads(tmp_path: Path) -> None:
    """The others wait, and run in the order in which they came."""
    results: list[int] = []

    async def ask(payload: int) -> None:
        results.append(await handler.call("handle_post", payload=payload))

    async with opened(tmp_path, HELD, "threads_per_process: 2\n") as handler, trio.open_nursery() as nursery:
        for payload in range(5):
            nursery.start_soon(ask, payload)
            await trio.testing.wait_all_tasks_blocked()
        await until_async(lambda: len(handler.instance.begun) == 2)
        let(handler.instance, 1)
        await until_async(lambda: handler.instance.begun == [0, 1, 2])
        let(handler.instance, 0, 2, 3, 4)
    assert sorted(results) == [0, 1, 2, 3, 4]
    assert handler.instance.begun[2:] == [2, 3, 4]


async def test_a_call_whose_caller_leaves_while_it_waits_is_not_made(tmp_path: Path) -> None:
    """And takes nobody's place."""
    async with opened(tmp_path, HELD) as handler, trio.open_nursery() as nursery:
        nursery.start_soon(partial(handler.call, "handle_post", payload=0))
        await until_async(lambda: handler.instance.begun == [0])
        with trio.move_on_after(0.01) as scope:
            await handler.call("handle_post", payload=1)
        assert scope.cancelled_caught
        let(handler.instance, 0, 2)
        assert await handler.call("handle_post", payload=2) == 2
    assert handler.instance.begun == [0, 2]


async def test_a_call_whose_caller_leaves_while_it_runs_keeps_its_thread(tmp_path: Path) -> None:
    """The caller does not wait for it, and no more threads run than there should."""
    async with opened(tmp_path, HELD) as handler, trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(until_async, lambda: handler.instance.begun == [0])
            nursery.start_soon(lambda: _cancel_when(scope, lambda: handler.instance.begun == [0]))
            await handler.call("handle_post", payload=0)
        assert scope.cancelled_caught
        nursery.start_soon(partial(handler.call, "handle_post", payload=1))
        with trio.move_on_after(0.05):
            await until_async(lambda: handler.instance.begun != [0])
        assert handler.instance.begun == [0]
        let(handler.instance, 0, 1)
    assert handler.instance.begun == [0, 1]


async def _cancel_when(scope: trio.CancelScope, true: Any) -> None:
    await until_async(true)
    scope.cancel()


async def test_async_methods_run_on_the_loop(tmp_path: Path) -> None:
    """However many, with their arguments, and cancelled where they wait."""
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


async def test_a_plain_method_may_give_a_coroutine(tmp_path: Path) -> None:
    """Which is awaited on the loop."""
    code = """
        class Handler:
            def handle_get(self):
                return self.later()
            async def later(self):
                return 7
        """
    async with opened(tmp_path, code) as handler:
        assert await handler.call("handle_get") == 7


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_what_a_method_raises_is_logged_once_and_hidden(tmp_path: Path, prefix: str) -> None:
    """The log has type, text, line and the user's own frames; the caller is told nothing of it."""
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
    assert (entry["log_level"], entry["method"]) == ("error", "handle_get")
    assert entry["error"] == "SystemExit: secret (handler.py:5)"
    frames = entry["exc_info"][2]
    names = []
    while frames is not None:
        names.append(frames.tb_frame.f_code.co_name)
        frames = frames.tb_next
    assert names == ["handle_get", "deeper"]


async def test_errors_that_say_what_they_are_pass(tmp_path: Path) -> None:
    """Those with a status without a word in the log, those of the server with one."""
    code = """
        from ovmstrio.core.errors import NotFound
        from ovmstrio.handlers import HTTPError
        class Handler:
            def handle_get(self):
                raise HTTPError(422, "no")
            def handle_put(self):
                raise NotFound("model x is unknown")
            def handle_post(self):
                raise ArithmeticError("wanted")
        """
    async with opened(tmp_path, code, code=HandlerCode("p", tmp_path, (ArithmeticError,))) as handler:
        with capture_logs() as logs:
            with pytest.raises(HTTPError, match="422: no"):
                await handler.call("handle_get")
            with pytest.raises(ArithmeticError, match="wanted"):
                await handler.call("handle_post")
            assert logs == []
            with pytest.raises(NotFound):
                await handler.call("handle_put")
            assert len(logs) == 1


async def test_starlettes_exceptions_have_their_status(tmp_path: Path) -> None:
    """Where it is installed."""
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
    """They run one after the other; what one raises is logged, and the next one runs."""
    code = """
        class Handler:
            def handle_get(self):
                return 7
        """
    order: list[Any] = []
    wait = threading.Event()

    async def on_loop() -> None:
        order.append(threading.get_ident())

    async with opened(tmp_path, code) as handler:
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


async def test_callbacks_are_waited_for_when_the_handler_ends(tmp_path: Path) -> None:
    """For a while; later ones are refused."""
    code = """
        class Handler:
            def handle_get(self):
                return 7
        """
    done: list[int] = []
    wait = threading.Event()
    async with trio.open_nursery() as nursery:
        async with opened(tmp_path, code) as handler:
            handler.run_after((partial(wait.wait, WAIT_SECONDS), partial(done.append, 1)))
            nursery.start_soon(_set_late, wait)
        assert done == [1]
    handler.run_after((partial(done.append, 2),))
    assert done == [1]


async def _set_late(event: threading.Event) -> None:
    """Set an event when there is nothing else to be done, so that somebody waits for it."""
    await trio.testing.wait_all_tasks_blocked()
    event.set()


async def test_functions_run_in_the_handlers_threads(tmp_path: Path) -> None:
    """And raise what they raise."""
    code = """
        import threading
        class Handler:
            def handle_get(self):
                return threading.get_ident()
        """
    async with opened(tmp_path, code) as handler:
        assert await handler.run_in_thread(threading.get_ident) == await handler.call("handle_get")
        with pytest.raises(ZeroDivisionError):
            await handler.run_in_thread(lambda: 1 / 0)
        with pytest.raises(KeyError):
            await handler.call("handle_post")


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_models_are_leased_to_the_end_of_a_call(tmp_path: Path, prefix: str) -> None:
    """And no longer; each call has leases of its own."""
    code = f"""
        from ovmstrio.runtimes.handlers.models.leases import current_call
        class Handler:
            def __init__(self):
                self.calls = []
            {prefix}def handle_get(self):
                self.calls.append(current_call())
                return self.calls[-1].hold("model", self.release)
            def release(self, held):
                self.calls.append(held)
        """
    async with opened(tmp_path, code) as handler:
        assert await handler.call("handle_get")
        first, released = handler.instance.calls
        assert (released, "model" in first) == ("model", False)
        await handler.call("handle_get")
        assert handler.instance.calls[2] is not first
