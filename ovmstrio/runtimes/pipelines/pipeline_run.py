"""One request going through a pipeline.

A *session* is one call of a node for one shard: its ``path`` holds an index for each demultiplexer around it, outermost
first.  A session is ready once all its inputs have come.  What a node gives goes to whoever is connected to it, split
or gathered on the way::

    session ends ─> outputs ─> shards ─┬─> inputs of a session behind it ─> ready
                                       └─> gathering, until all shards are there ─> inputs ─> ready

A run of which only one session is ready at a time, as in a chain, stays in the caller's task; from where it branches on
it is a nursery with a task for each further session, up to ``MAX_TASKS``.  Sessions beyond that wait for a task to be
free, so that ten thousand shards leave the event loop to other requests in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from ovmstrio.core.errors import NothingToGather, PipelineFailure
from ovmstrio.core.tensor import Tensor
from ovmstrio.runtimes.pipelines.node_checks import MIN_RANK_TO_SPLIT
from ovmstrio.runtimes.pipelines.structure import DYNAMIC, ENTRY, EXIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import InferRequest
    from ovmstrio.runtimes.pipelines.pipeline_plan import Link, NodePlan

__all__ = ["PipelineRun"]

Path = tuple[int, ...]
Session = tuple["NodePlan", Path, dict[str, Tensor]]

MAX_SHARDS = 10_000

MAX_TASKS = 64
"""How many sessions of one request may be under way."""


class PipelineRun:
    """Takes one request through a plan; used once."""

    __slots__ = ("_answer", "_backlog", "_counts", "_entry", "_failure", "_gathering", "_request", "_tasks", "_waiting")

    def __init__(self, entry: NodePlan, request: InferRequest) -> None:
        self._entry = entry
        self._request = request
        self._waiting: dict[tuple[str, Path], dict[str, Tensor]] = {}
        self._gathering: dict[tuple[Link, int, Path], dict[int, Tensor]] = {}
        self._counts: dict[tuple[str, Path], int] = {}
        self._tasks = 0
        self._backlog: list[Session] = []
        self._failure: Exception | None = None
        self._answer: dict[str, Tensor] = {}

    async def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Give the pipeline's outputs by name.

        Raises:
            ServerError: the first failure of a node; the others have been cancelled.
            NothingToGather: a demultiplexer had nothing to split.
            PipelineFailure: what a node gave cannot be split or gathered.

        Ownership: the tasks of the sessions, at most ``MAX_TASKS``, until this returns.
        Cancellation: at any checkpoint; every session is cancelled first.
        """
        ready = self._deliver(self._entry, (), inputs)
        while len(ready) == 1:
            node, path, given = ready[0]
            if node.name == EXIT:
                return given
            ready = self._deliver(node, path, await node.call(given, self._request))
        return await self._branch(ready)

    async def _branch(self, ready: Sequence[Session]) -> dict[str, Tensor]:
        # Nothing here may come to refer to itself: tensors would be kept until the garbage collector looks.
        async with trio.open_nursery() as nursery:
            self._tasks = 1
            nursery.start_soon(self._work, nursery, self._start(nursery, ready))
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure
        return self._answer

    async def _work(self, nursery: trio.Nursery, session: Session | None) -> None:
        try:
            while session is not None:
                session = self._start(nursery, await self._call(session)) or await self._next()
        except Exception as error:  # noqa: BLE001 - kept from becoming a group, and raised by _branch
            self._failure = self._failure or error
            nursery.cancel_scope.cancel()
        finally:
            self._tasks -= 1

    def _start(self, nursery: trio.Nursery, sessions: Sequence[Session]) -> Session | None:
        """Start a task for each session but the last, which is the caller's to go on with; some may have to wait."""
        if sessions and sessions[0][0].name == EXIT:
            self._answer = sessions[0][2]
            return None
        for session in sessions[:-1]:
            if self._tasks < MAX_TASKS:
                self._tasks += 1
                nursery.start_soon(self._work, nursery, session)
            else:
                self._backlog.append(session)
        return sessions[-1] if sessions else None

    async def _next(self) -> Session | None:
        """Take a session that waits for a task, if there is one: the latest, which brings what is deepest to its end.

        Cancellation: at once; the session goes on waiting.
        """
        if not self._backlog:
            return None
        await trio.lowlevel.checkpoint()  # other requests get their turn, even if no node ever waits
        return self._backlog.pop() if self._backlog else None

    async def _call(self, session: Session) -> list[Session]:
        """PipelineRun one session and give those that are ready now."""
        node, path, inputs = session
        return self._deliver(node, path, await node.call(inputs, self._request))

    def _deliver(self, node: NodePlan, path: Path, outputs: Mapping[str, Tensor]) -> list[Session]:
        """Pass on what a node gave, and give the sessions that are ready by that."""
        if node.follower is not None:
            return [(node.follower, path, {link.name: _shared(outputs[link.item], link) for link in node.links})]
        ready: list[Session] = []
        if not node.splits:
            for link in node.links:
                self._pass(link, path, _shared(outputs[link.item], link), ready)
            return ready
        count = self._counts[node.name, path] = _count_shards(node, outputs)
        for link in node.links:
            tensor = _shared(outputs[link.item], link)
            link.tally.passed += count - 1
            for shard in range(count):
                self._pass(link, (*path, shard), Tensor(tensor.name, tensor.datatype, tensor.array[shard]), ready)
        return ready

    def _pass(self, link: Link, path: Path, tensor: Tensor, ready: list[Session]) -> None:
        """Bring a tensor to where a connection leads, if it need not wait for other shards."""
        for depth, demultiplexer in enumerate(link.gathers):
            key = (link, depth, path[:-1])
            shards = self._gathering.setdefault(key, {})
            shards[path[-1]] = tensor
            path = path[:-1]
            if len(shards) < self._counts[demultiplexer, path]:
                return
            del self._gathering[key]
            tensor = _gather(link, shards)
        inputs = self._waiting.setdefault((link.target.name, path), {})
        inputs[link.name] = tensor
        if len(inputs) == link.target.needs:
            del self._waiting[link.target.name, path]
            ready.append((link.target, path, inputs))


def _shared(tensor: Tensor, link: Link) -> Tensor:
    """Count a tensor that goes along a connection, and keep one that others get as well from being written to."""
    link.tally.passed += 1
    if not link.is_shared or not tensor.array.flags.writeable:
        return tensor
    view = tensor.array.view()
    view.flags.writeable = False
    return Tensor(tensor.name, tensor.datatype, view)


def _count_shards(node: NodePlan, outputs: Mapping[str, Tensor]) -> int:
    """Find out into how many shards a node's outputs are split.

    Raises:
        PipelineFailure: they cannot be split, or not all alike.
        NothingToGather: into none.
    """
    shapes = {link.item: outputs[link.item].shape for link in node.links}
    whose = "the pipeline" if node.name == ENTRY else f"node {node.name!r}"
    for item, shape in shapes.items():
        if len(shape) < MIN_RANK_TO_SPLIT:
            raise _failed("Wrong number of dimensions in a blob!", f"{whose} splits {item!r} of shape {_show(shape)}")
        if shape[0] > MAX_SHARDS:
            raise _failed(
                "Too large dimension size to demultiply", f"{whose}: {item!r} is {_show(shape)}, at most {MAX_SHARDS}"
            )
    counts = {shape[0] for shape in shapes.values()}
    expected = node.splits if node.splits != DYNAMIC else next(iter(counts))
    if counts != {expected}:
        shown = ", ".join(f"{item!r} of shape {_show(shape)}" for item, shape in shapes.items())
        raise _failed("Wrong dimension size to demultiply", f"{whose} is to be split into {expected}: {shown}")
    if not expected:
        raise NothingToGather(f"Demultiplexer had no results: {whose} gave nothing to split")
    return expected


def _gather(link: Link, shards: Mapping[int, Tensor]) -> Tensor:
    """Put shards together along a new first dimension, in their order.

    Raises:
        PipelineFailure: they are not all alike.
    """
    first = shards[0]
    for index, shard in shards.items():
        if shard.shape != first.shape or shard.datatype is not first.datatype:
            found = f"shard 0 is {first.datatype.name} {_show(first.shape)}"
            other = f"shard {index} is {shard.datatype.name} {_show(shard.shape)}"
            raise _failed("Shards have inconsistent dimensions", f"gathering {link.item!r}: {found}, {other}")
    arrays: list[Any] = [shards[index].array for index in range(len(shards))]
    return Tensor(first.name, first.datatype, np.stack(arrays))


def _failed(fixed: str, detail: str) -> PipelineFailure:
    return PipelineFailure(f"{fixed} - {detail}")


def _show(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"
