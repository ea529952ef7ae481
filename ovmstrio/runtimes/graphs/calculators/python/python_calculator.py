"""A Python node in one running graph."""

from __future__ import annotations

import contextvars
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

from ovmstrio.runtimes.graphs.calculator import NodeContext, NodeFailure
from ovmstrio.runtimes.graphs.calculators.python.python_contract import LOOPBACK
from ovmstrio.runtimes.graphs.calculators.python.python_outputs import (
    Outputs,
    WrongOutputError,
    routed,
    routed_yield,
    unexpected_result,
)
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_user_code
from ovmstrio.work.user_code.places import place_of
from ovmstrio.work.user_code.pumps import AsyncPump, End, Failed, Pump, ThreadPump
from pyovms import Context
from pyovms.context import CURRENT

if TYPE_CHECKING:
    from ovmstrio.runtimes.graphs.calculators.python.python_handler import NodeHandler

__all__ = ["PythonCalculator", "node_context"]

log = structlog.get_logger(__name__)

_BUSY: Final = "Node is already processing data. Create new stream for another request."
_NO_LOOPBACK: Final = "Execute yielded, but LOOPBACK is not defined in the node"
_NOTHING_YIELDED: Final = "the generator of execute ended without yielding anything; yield [] to send nothing"


class PythonCalculator:
    """Runs a handler's object for one call or stream."""

    def __init__(self, handler: NodeHandler, context: NodeContext) -> None:
        instance = context.instance
        self._handler = handler
        self._instance = instance
        seconds = math.inf if instance.deadline == math.inf else instance.deadline - trio.current_time()
        self._context = Context(instance.parameters, instance.request_id, seconds, self._is_cancelled)
        self._variables = contextvars.copy_context()
        self._variables.run(CURRENT.set, self._context)
        self._pump: Pump[Outputs] | None = None
        self._timestamp = 0
        self._is_open = False
        self._is_stopped = False

    # Life

    async def open(self) -> None:
        """Run the handler's ``open``, where it has one.

        Raises:
            NodeFailure: it raised.
            ServerError: it raised this itself.

        Cancellation: as :meth:`WorkerThreads.call`; the handler's ``close`` is run even so.
        """
        hook = self._handler.open_hook
        if hook is not None:
            try:
                await self._call("open", hook, self._context)
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await self._close_handler()
                raise
        self._is_open = True

    async def close(self, context: NodeContext) -> None:
        """Stop and close the generator, then run the handler's ``close``; what they raise is logged.

        Cancellation: shielded, for as long as the pool gives user code that is to stop.
        """
        del context
        pump, self._pump = self._pump, None
        if pump is not None:
            self._stop()
            error = await pump.aclose()
            if error is not None:
                self._handler.user_code.report(error, "closing a generator", request_id=self._instance.request_id)
        if self._is_open:
            self._is_open = False
            await self._close_handler()

    async def _close_handler(self) -> None:
        hook = self._handler.close_hook
        if hook is None:
            return
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._handler.grace_seconds) as scope:
            try:
                await self._call("close", hook, self._context)
            except Exception:  # noqa: BLE001 - it has been logged, and an end has nobody to tell
                return
        if scope.cancelled_caught:
            log.error("close of a Python node did not end", graph=self._instance.graph, node=self._handler.node.name)

    # Runs

    async def process(self, context: NodeContext) -> None:
        """Call ``execute``, or take the next value of its generator.

        Raises:
            NodeFailure: user code raised, or gave back something wrong; or data came while a generator runs.
            ServerError: user code raised it.

        Cancellation: user code in a thread is told, and given the pool's grace; user code on the event loop is
        cancelled where it waits.
        """
        if self._pump is not None:
            if any(port != LOOPBACK for port in context.inputs):
                raise NodeFailure(_BUSY, "RESOURCE_EXHAUSTED")
            await self._take(context, self._pump)
            return
        inputs = [value for port, value in context.inputs.items() if port != LOOPBACK]
        if len(inputs) != self._handler.input_count:
            log.debug("a Python node runs without some of its inputs", node=self._handler.node.name, given=len(inputs))
        result = await self._call("execute", self._handler.model.execute, inputs)
        if isinstance(result, list):
            self._emit(context, result)
        elif result is None:
            # It fell off its end: nothing is sent, as with an empty list.
            return
        else:
            self._pump = self._make_pump(result)
            self._timestamp = context.timestamp
            await self._take(context, self._pump, is_first=True)

    def _emit(self, context: NodeContext, result: list[Any]) -> None:
        try:
            outputs = routed(result, self._handler.ports, "execute returned a list")
        except WrongOutputError as error:
            raise self._handler.user_code.wrong(error) from None
        for port, tensor in outputs:
            context.emit(port, tensor)

    def _make_pump(self, result: Any) -> Pump[Outputs]:
        handler = self._handler
        is_async = inspect.isasyncgen(result)
        if not is_async and not hasattr(result, "__next__"):
            raise handler.user_code.wrong(unexpected_result(result))
        if not handler.has_loopback:
            raise handler.user_code.wrong(_NO_LOOPBACK)
        convert = partial(routed_yield, ports=handler.ports)
        if is_async:
            return AsyncPump(result, convert, handler.grace_seconds, partial(node_context, self._variables))
        return ThreadPump(result, convert, handler.threads, self._variables)

    async def _take(self, context: NodeContext, pump: Pump[Outputs], *, is_first: bool = False) -> None:
        """Send the next value of the generator, and call for the next run."""
        item = await pump.pull()
        if isinstance(item, End):
            self._pump = None
            if is_first:
                raise self._handler.user_code.wrong(_NOTHING_YIELDED)
        elif isinstance(item, Failed):
            raise self._failure(item.error, "execute", self._handler.model.execute)
        else:
            timestamp = self._timestamp
            for port, tensor in item:
                context.emit(port, tensor, timestamp)
            self._timestamp = timestamp + 1
            context.emit(LOOPBACK, value=True, timestamp=timestamp + 1)

    # User code

    async def _call(self, step: str, method: Callable[..., Any], *args: Any) -> Any:
        handler = self._handler
        try:
            return await call_user_code(
                handler.threads, method, args,
                around=partial(node_context, self._variables), context=self._variables, on_cancel=self._stop,
            )  # fmt: skip
        except UserCodeRaisedError as raised:
            raise self._failure(raised.error, step, method) from None

    def _failure(self, error: BaseException, step: str, method: Callable[..., Any]) -> Exception:
        user_code = self._handler.user_code
        if isinstance(error, WrongOutputError):
            return user_code.wrong(error)
        return user_code.failure(error, step, request_id=self._instance.request_id, otherwise=place_of(method))

    def _stop(self) -> None:
        self._is_stopped = True

    def _is_cancelled(self) -> bool:
        return self._is_stopped or self._instance.is_cancelled


@contextmanager
def node_context(context: contextvars.Context) -> Iterator[None]:
    """Let ``current_context()`` give, on the event loop, what it gives in ``context``."""
    current = context.get(CURRENT)
    if current is None:
        yield
        return
    token = CURRENT.set(current)
    try:
        yield
    finally:
        CURRENT.reset(token)
