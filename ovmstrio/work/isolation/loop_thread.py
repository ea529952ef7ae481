"""The event loop of a worker process, for async code of users; there is none before somebody needs it."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from ovmstrio.core.line_streams import finish_lines
from ovmstrio.work.messages.exits import LOST_LOOP

if TYPE_CHECKING:
    import trio

__all__ = ["LoopCall", "LoopThread"]


class LoopCall:
    """One call on the loop."""

    def __init__(self, token: trio.lowlevel.TrioToken, scope: trio.CancelScope) -> None:
        self._token = token
        self._scope = scope

    def cancel(self) -> None:
        """Cancel it where it waits; from any thread."""
        self._token.run_sync_soon(self._scope.cancel)


class LoopThread:
    """A thread that runs trio's loop as long as the process lives."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._ready = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    def call(
        self,
        function: Callable[[], Awaitable[Any]],
        done: Callable[[Any, BaseException | None], None],
        variables: Context | None = None,
    ) -> LoopCall:
        """Run an async function, and call ``done`` on the loop with what it gives or raises.

        Raises:
            ModuleNotFoundError: the interpreter has no trio.
        """
        import trio  # noqa: PLC0415 - only those who have async code need it

        token, scope = self._start(), trio.CancelScope()

        async def run() -> None:
            error: BaseException | None = None
            value = None
            with scope:
                try:
                    value = await function()
                except trio.Cancelled:
                    error = InterruptedError("cancelled")
                    raise
                except BaseException as raised:  # noqa: BLE001 - the border of user code
                    error = raised
                finally:
                    finish_lines()
                    done(value, error)

        def begin() -> None:
            if self._nursery is not None:
                (variables or copy_context()).copy().run(self._nursery.start_soon, run)

        token.run_sync_soon(begin)
        return LoopCall(token, scope)

    @staticmethod
    def turns() -> trio.Lock:
        """Make what functions that must not run side by side hold on the loop."""
        import trio  # noqa: PLC0415 - as above

        return trio.Lock()

    def _start(self) -> trio.lowlevel.TrioToken:
        with self._starting:
            if self._token is None:
                threading.Thread(target=self._host, name="loop of async user code", daemon=True).start()
                self._ready.wait()
            assert self._token is not None  # noqa: S101 - the thread has set it
            return self._token

    def _host(self) -> None:
        import trio  # noqa: PLC0415 - as above

        try:
            trio.run(self._run)
        except BaseException:  # noqa: BLE001 - nobody who waits for the loop would ever be answered
            traceback.print_exc()
        os._exit(LOST_LOOP)

    async def _run(self) -> None:
        import trio  # noqa: PLC0415 - as above

        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()
