"""The object of a Python node in this process: plain code in worker threads, async code on the event loop."""

from __future__ import annotations

import contextvars
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio

from ovmstrio.core.line_streams import code_names, running_code_of
from ovmstrio.core.tracing import current_span
from ovmstrio.runtimes.graphs.calculator import InstanceContext
from ovmstrio.runtimes.graphs.calculators.python.node_model import HookPair, NodeModel, NodeOutline
from ovmstrio.runtimes.graphs.calculators.python.python_outputs import (
    Outputs,
    WrongOutputError,
    as_tensors,
    routed,
    routed_yield,
    unexpected_result,
)
from ovmstrio.runtimes.graphs.config.graph_config import Port
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_user_code
from ovmstrio.work.user_code.places import SourceLine, place_of
from ovmstrio.work.user_code.pumps import AsyncPump, Pump, ThreadPump
from pyovms import Context, Tensor
from pyovms.context import CURRENT

__all__ = ["NodeInThreads"]


class NodeInThreads:
    """One object; see :class:`NodeCode`.

    Args:
        outline: what it is made of.
        ports: where outputs leave, by the names of their streams.
        threads: where plain code runs.
        graph: the graph's name, for what the code prints.
    """

    def __init__(self, outline: NodeOutline, ports: Mapping[str, Port], threads: WorkerThreads, graph: str) -> None:
        self.names = {"servable": graph, "node": outline.node}
        self.made = NodeModel(outline)
        self.ports = ports
        self.threads = threads
        self.has_loopback = outline.has_loopback
        self.documents = outline.documents

    async def load(self) -> None:
        """Make the object and initialize it; see :class:`NodeCode`.

        Cancellation: as :meth:`WorkerThreads.call`.
        """
        with running_code_of(self.names):
            await call_user_code(self.threads, self.made.make)
            await call_user_code(self.threads, self.made.initialize)

    async def finalize(self) -> None:
        """Run ``finalize``; see :class:`NodeCode`.

        Raises:
            RuntimeError: ``initialize`` has not ended, or the threads do not run any more.

        Cancellation: as :meth:`WorkerThreads.call`.
        """
        finalize = self.made.method("finalize")
        if finalize is None:
            return
        if self.made.is_initializing:
            raise RuntimeError("initialize has not ended")
        with running_code_of(self.names):
            await call_user_code(self.threads, finalize)

    async def aclose(self) -> None:
        """Forget the object and its modules."""
        self.made.unload()

    def instance(self, context: InstanceContext) -> _ThreadedInstance:
        """Make what calls the object for one call or stream."""
        return _ThreadedInstance(self, context)

    def place_of(self, method: str) -> SourceLine | None:
        """Give the line where a method is defined, if that is known."""
        found = self.made.method(method)
        return None if found is None else place_of(found)


class _ThreadedInstance:
    """See :class:`InstanceCode`."""

    def __init__(self, node: NodeInThreads, instance: InstanceContext) -> None:
        self._node = node
        self._instance = instance
        seconds = math.inf if instance.deadline == math.inf else instance.deadline - trio.current_time()
        self._context = Context(instance.parameters, instance.request_id, seconds, self._is_cancelled)
        self._variables = contextvars.copy_context()
        self._variables.run(CURRENT.set, self._context)
        self._variables.run(code_names.set, node.names)
        self._is_stopped = False
        self._pair = HookPair()

    async def open(self) -> None:
        hook = self._node.made.hooks.get("open")
        if hook is None:
            self._pair.begin()
        else:
            await self._call(self._pair.opening(hook), self._context)

    async def close(self) -> None:
        hook = self._node.made.hooks.get("close")
        if self._pair.end() and hook is not None:
            await self._call(hook, self._context)

    async def execute(self, inputs: list[Tensor]) -> Outputs | Pump[Outputs]:
        node = self._node
        result = await self._call(node.made.model.execute, inputs)
        if result is None:
            # It fell off its end: nothing is sent, as with an empty list.
            return []
        try:
            result = as_tensors(result, node.documents)
            if isinstance(result, list):
                return routed(result, node.ports, "execute returned a list")
            return self._make_pump(result)
        except WrongOutputError as error:
            raise UserCodeRaisedError(error) from None

    def _make_pump(self, result: Any) -> Pump[Outputs]:
        node = self._node
        is_async = inspect.isasyncgen(result)
        if not node.has_loopback or not (is_async or hasattr(result, "__next__")):
            raise unexpected_result(result)

        def convert(value: Any) -> Outputs:
            return routed_yield(as_tensors(value, node.documents), node.ports)

        if is_async:
            around = partial(_node_context, self._variables)
            return AsyncPump(result, convert, node.threads.grace_seconds, around)
        return ThreadPump(result, convert, node.threads, self._variables)

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        span = current_span.get()
        if span is not None:
            # The instance was made outside of the span of this run.
            self._variables.run(span.as_current().__enter__)
        return await call_user_code(
            self._node.threads, method, args,
            around=partial(_node_context, self._variables), context=self._variables, on_cancel=self.stop,
        )  # fmt: skip

    def stop(self) -> None:
        self._is_stopped = True

    def _is_cancelled(self) -> bool:
        return self._is_stopped or self._instance.is_cancelled


@contextmanager
def _node_context(context: contextvars.Context) -> Iterator[None]:
    """Let ``current_context()`` give, on the event loop, what it gives in ``context``."""
    current = context.get(CURRENT)
    if current is None:
        yield
        return
    token = CURRENT.set(current)
    try:
        with running_code_of(context.get(code_names)):
            yield
    finally:
        CURRENT.reset(token)
