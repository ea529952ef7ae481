"""The object of a Python node in worker processes, one in each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

import structlog
import trio

from ovmstrio.runtimes.graphs.calculator import InstanceContext
from ovmstrio.runtimes.graphs.calculators.python.node_model import NodeOutline
from ovmstrio.runtimes.graphs.calculators.python.python_outputs import Outputs
from ovmstrio.runtimes.graphs.calculators.python.tensor_rows import tensor_of, tensor_row
from ovmstrio.runtimes.graphs.config.graph_config import Port
from ovmstrio.work.isolation.isolated_code import CodeWorker, IsolatedCode, Isolation
from ovmstrio.work.isolation.remote_generator import RemoteGenerator
from ovmstrio.work.processes import WorkerEnded
from ovmstrio.work.user_code.calls import UserCodeRaisedError
from ovmstrio.work.user_code.places import SourceLine
from ovmstrio.work.user_code.pumps import End, Failed, Pump
from pyovms import Tensor

__all__ = ["NodeInProcesses"]

log = structlog.get_logger(__name__)

_HOSTED: Final = "ovmstrio.runtimes.graphs.calculators.python.hosted_node:host_node"
_CLOSE_SECONDS: Final = 2.0


class NodeInProcesses:
    """The objects of a node; see :class:`NodeCode`.

    Args:
        outline: what each is made of.
        ports: where outputs leave, by the names of their streams.
        isolation: how many processes, and their limits.
        tasks: hosts the processes, and outlives the node.
        graph: the graph's name, for the log.
    """

    def __init__(
        self,
        outline: NodeOutline,
        ports: Mapping[str, Port],
        isolation: Isolation,
        tasks: trio.Nursery,
        graph: str,
    ) -> None:
        self.ports = ports
        self.numbers = itertools.count(1)
        self.hooks: frozenset[str] = frozenset()
        self._tasks = tasks
        self._places: dict[str, Any] = {}
        names = {"servable": graph, "node": outline.node}
        self.code = IsolatedCode(isolation, _HOSTED, list(outline), prepare=self._prepare, names=names)
        self._names = names
        self._raised: list[BaseException] = []

    async def load(self) -> None:
        """Start all processes and initialize their objects; see :class:`NodeCode`.

        Cancellation: at once; the processes are killed.
        """
        await self._tasks.start(self.code.run)

    async def _prepare(self, worker: CodeWorker) -> None:
        """Make the object of one process.

        Raises:
            UserCodeRaisedError: the user's code raised.
            WorkerEnded: the process ended.

        Cancellation: at once.
        """
        told = await worker.call("make", None, is_limited=False)
        self.hooks = frozenset(told["hooks"])
        self._places = told["places"]
        try:
            await worker.call("initialize", None, is_limited=False)
        except UserCodeRaisedError:
            # It may hold something already.
            await self._finalize(worker)
            raise

    async def finalize(self) -> None:
        """Run ``finalize`` in each process, and end it then; see :class:`NodeCode`.

        Cancellation: shielded, for ``_CLOSE_SECONDS`` more than that takes.
        """
        await self.code.aclose(self._finalize, _CLOSE_SECONDS)
        if self._raised:
            raise UserCodeRaisedError(self._raised.pop())

    async def _finalize(self, worker: CodeWorker) -> None:
        # Nobody waits for a call any more, but one that was told to stop may be about to.
        with trio.move_on_after(_CLOSE_SECONDS):
            await worker.process.idle()
        # One that goes on may never end, nor let anything else run.
        patience = _CLOSE_SECONDS if worker.process.is_busy else math.inf
        with trio.move_on_after(patience) as scope:
            try:
                await worker.call("finalize", None, is_limited=False)
            except UserCodeRaisedError as raised:
                self._raised.append(raised.error)
            except WorkerEnded as end:
                log.error("finalize cannot run", reason=end.why, **self._names)  # noqa: TRY400 - no bug of its own
        if scope.cancelled_caught:
            log.error("finalize cannot run", reason="a call that was left does not end", **self._names)

    async def aclose(self) -> None:
        """End all processes; see :class:`NodeCode`."""
        await self.code.aclose(_do_nothing, _CLOSE_SECONDS)

    def instance(self, context: InstanceContext) -> _IsolatedInstance:
        """Make what calls an object for one call or stream."""
        return _IsolatedInstance(self, context)

    def place_of(self, method: str) -> SourceLine | None:
        """Give the line where a method is defined, if that is known."""
        place = self._places.get(method)
        return None if place is None else SourceLine(*place)

    def outputs(self, rows: Iterable[Any]) -> Outputs:
        """Give the tensors of rows, and where they leave.

        Raises:
            ValueError, TypeError, LookupError: they are none of this node's.
        """
        tensors = [tensor_of(row) for row in rows]
        return [(self.ports[tensor.name], tensor) for tensor in tensors]


async def _do_nothing(worker: CodeWorker) -> None:
    """Finalize nothing."""


class _IsolatedInstance:
    """See :class:`InstanceCode`.  All calls go to one process, as long as it lives or remembers anything."""

    def __init__(self, node: NodeInProcesses, instance: InstanceContext) -> None:
        self._node = node
        self._instance = instance
        self._number = next(node.numbers)
        self._worker: CodeWorker | None = None
        self._is_kept = False

    async def open(self) -> None:
        if "open" not in self._node.hooks:
            return
        while True:
            # It is to be closed in this process, should the caller leave while it is opened.
            worker = self._worker = await self._node.code.worker()
            self._is_kept = True
            try:
                await worker.call("open", [self._number, self._told()])
            except WorkerEnded as end:
                if end.was_called:
                    raise
            except UserCodeRaisedError:
                worker.forget(self._number)
                raise
            else:
                return

    async def execute(self, inputs: list[Tensor]) -> Outputs | Pump[Outputs]:
        result = await self._call("execute", [tensor_row(tensor) for tensor in inputs])
        if isinstance(result, RemoteGenerator):
            self._is_kept = True
            return _IsolatedPump(result, self._node)
        self._is_kept, rows = result
        return self._node.outputs(rows)

    async def _call(self, method: str, *more: Any) -> Any:
        value = [self._number, self._told(), *more]
        worker = self._worker
        if worker is not None and (self._is_kept or not worker.process.is_retired):
            return await worker.call(method, value)
        self._worker, result = await self._node.code.call(method, value)
        return result

    def _told(self) -> list[Any]:
        instance = self._instance
        seconds = None if instance.deadline == math.inf else instance.deadline - trio.current_time()
        return [dict(instance.parameters), instance.request_id, seconds]

    def stop(self) -> None:
        """Do nothing: a process is told of calls that are cancelled, and of generators that are closed."""

    async def close(self) -> None:
        worker = self._worker
        if worker is None or not self._is_kept:
            return
        try:
            if "close" in self._node.hooks:
                await worker.call("close", [self._number, self._told()])
        finally:
            worker.forget(self._number)


class _IsolatedPump:
    """A generator in a process, whose values are the outputs of a node."""

    def __init__(self, generator: RemoteGenerator, node: NodeInProcesses) -> None:
        self._generator = generator
        self._convert = partial(node.outputs)

    async def pull(self) -> Outputs | End | Failed:
        item = await self._generator.pull()
        return item if isinstance(item, End | Failed) else self._convert(item)

    async def aclose(self) -> BaseException | None:
        return await self._generator.aclose()
