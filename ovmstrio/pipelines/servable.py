"""A pipeline as a servable, and the execution of its requests.

A *session* is one call of a node for one shard: its ``path`` has an index for each enclosing demultiplexer, outermost
first. A session is ready once it has all inputs. Outputs go to the connected nodes, split or gathered on the way::

    session ends ─> outputs ─> shards ─┬─> inputs of a following session ─> ready
                                       └─> gathering, until all shards are there ─> inputs ─> ready

While only one session is ready at a time, as in a chain, the run stays in the caller's task. After a branch it is a
nursery with a task per session, up to ``MAX_TASKS``; further sessions wait, so that ten thousand shards do not block
the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import trio

from ovmstrio.core.errors import ErrorList, NothingToGather, PipelineFailure
from ovmstrio.core.request import InferRequest, InferResponse, ServableMetadata
from ovmstrio.core.service import NO_INTROSPECTION, Introspection
from ovmstrio.core.tensor import BY_NAME, Array, Dim, RawTensor, Tensor, TensorSpec
from ovmstrio.models.request_errors import input_mismatch
from ovmstrio.models.tensor_contents import rows_to_strings
from ovmstrio.models.validation import Validator, validated
from ovmstrio.pipelines.signatures import MIN_RANK_TO_SPLIT, is_open
from ovmstrio.pipelines.structure import DYNAMIC, ENTRY, EXIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ovmstrio.core.request import InferInput
    from ovmstrio.core.tensor import Datatype
    from ovmstrio.pipelines.custom_node import CustomNode
    from ovmstrio.pipelines.plan import Link, NodePlan

# ----------------------------------------------------------------------
# Execution
# ----------------------------------------------------------------------

Path = tuple[int, ...]
Session = tuple["NodePlan", Path, dict[str, Tensor]]

MAX_SHARDS = 10_000

MAX_TASKS = 64
"""Limit of concurrent sessions per request."""


class PipelineRun:
    """Execution of one request; used once."""

    __slots__ = (
        "_backlog",
        "_counts",
        "_entry",
        "_failure",
        "_gathering",
        "_outputs",
        "_request",
        "_tasks",
        "_waiting",
    )

    def __init__(self, entry: NodePlan, request: InferRequest) -> None:
        self._entry = entry
        self._request = request
        self._waiting: dict[tuple[str, Path], dict[str, Tensor]] = {}
        self._gathering: dict[tuple[Link, int, Path], dict[int, Tensor]] = {}
        self._counts: dict[tuple[str, Path], int] = {}
        self._tasks = 0
        self._backlog: list[Session] = []
        self._failure: Exception | None = None
        self._outputs: dict[str, Tensor] = {}

    async def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the pipeline's outputs by name. On cancellation, all sessions are cancelled first.

        Raises:
            ServerError: the first failure of a node; the others have been cancelled.
            NothingToGather: a demultiplexer had nothing to split.
            PipelineFailure: an output cannot be split or gathered.
        """
        ready = self._deliver(self._entry, (), inputs)
        while len(ready) == 1:
            node, path, given = ready[0]
            if node.name == EXIT:
                return given
            ready = self._deliver(node, path, await node.call(given, self._request))
        return await self._branch(ready)

    async def _branch(self, ready: Sequence[Session]) -> dict[str, Tensor]:
        # Avoid reference cycles, which would keep tensors until the next garbage collection.
        async with trio.open_nursery() as nursery:
            self._tasks = 1
            nursery.start_soon(self._work, nursery, self._start(nursery, ready))
        if self._failure is not None:
            failure, self._failure = self._failure, None
            try:
                raise failure
            finally:
                del failure
        return self._outputs

    async def _work(self, nursery: trio.Nursery, session: Session | None) -> None:
        try:
            while session is not None:
                session = self._start(nursery, await self._call(session)) or await self._next()
        except Exception as error:  # noqa: BLE001 - raised by _branch, so that it is not grouped
            self._failure = self._failure or error
            nursery.cancel_scope.cancel()
        finally:
            self._tasks -= 1

    def _start(self, nursery: trio.Nursery, sessions: Sequence[Session]) -> Session | None:
        """Start a task for each session except the last one, which is returned; queue those above the limit."""
        if sessions and sessions[0][0].name == EXIT:
            self._outputs = sessions[0][2]
            return None
        for session in sessions[:-1]:
            if self._tasks < MAX_TASKS:
                self._tasks += 1
                nursery.start_soon(self._work, nursery, session)
            else:
                self._backlog.append(session)
        return sessions[-1] if sessions else None

    async def _next(self) -> Session | None:
        """Return the newest waiting session, which is the deepest, or None."""
        if not self._backlog:
            return None
        await trio.lowlevel.checkpoint()  # let other requests run, even if no node waits
        return self._backlog.pop() if self._backlog else None

    async def _call(self, session: Session) -> list[Session]:
        """Run one session and return the sessions that became ready."""
        node, path, inputs = session
        return self._deliver(node, path, await node.call(inputs, self._request))

    def _deliver(self, node: NodePlan, path: Path, outputs: Mapping[str, Tensor]) -> list[Session]:
        """Send the outputs of a node and return the sessions that became ready."""
        if node.follower is not None:
            return [(node.follower, path, {link.name: _shareable(outputs[link.item], link) for link in node.links})]
        ready: list[Session] = []
        if not node.splits or not node.links:
            for link in node.links:
                self._send(link, path, _shareable(outputs[link.item], link), ready)
            return ready
        count = self._counts[node.name, path] = _count_shards(node, outputs)
        for link in node.links:
            tensor = _shareable(outputs[link.item], link)
            link.tally.passed += count - 1
            for shard in range(count):
                self._send(link, (*path, shard), Tensor(tensor.name, tensor.datatype, tensor.array[shard]), ready)
        return ready

    def _send(self, link: Link, path: Path, tensor: Tensor, ready: list[Session]) -> None:
        """Send a tensor along a link, unless it must wait for other shards."""
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


def _shareable(tensor: Tensor, link: Link) -> Tensor:
    """Count a tensor on a link; return a read-only view if the output has other consumers."""
    link.tally.passed += 1
    if not link.is_shared or not tensor.array.flags.writeable:
        return tensor
    view = tensor.array.view()
    view.flags.writeable = False
    return Tensor(tensor.name, tensor.datatype, view)


def _count_shards(node: NodePlan, outputs: Mapping[str, Tensor]) -> int:
    """Return the number of shards of a node's outputs."""
    shapes = {link.item: outputs[link.item].shape for link in node.links}
    owner = "the pipeline" if node.name == ENTRY else f"node {node.name!r}"
    for item, shape in shapes.items():
        if len(shape) < MIN_RANK_TO_SPLIT:
            raise _failed("Wrong number of dimensions in a blob!", f"{owner} splits {item!r} of shape {_show(shape)}")
        if shape[0] > MAX_SHARDS:
            raise _failed(
                "Too large dimension size to demultiply", f"{owner}: {item!r} is {_show(shape)}, at most {MAX_SHARDS}"
            )
    counts = {shape[0] for shape in shapes.values()}
    expected = node.splits if node.splits != DYNAMIC else next(iter(counts))
    if counts != {expected}:
        shown = ", ".join(f"{item!r} of shape {_show(shape)}" for item, shape in shapes.items())
        raise _failed("Wrong dimension size to demultiply", f"{owner} splits into {expected}: {shown}")
    if not expected:
        raise NothingToGather(f"Demultiplexer had no results: {owner} returned nothing to split")
    return expected


def _gather(link: Link, shards: Mapping[int, Tensor]) -> Tensor:
    """Stack shards along a new first dimension."""
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


# Node calls


# ----------------------------------------------------------------------
# Servable
# ----------------------------------------------------------------------

_PLATFORM = "OpenVINO"
_VERSION = "1"


class PipelineServable:
    """A loaded pipeline.

    ``entry`` links to all other nodes; ``custom_nodes`` are closed with the pipeline; ``inside`` is its introspection.
    """

    def __init__(
        self,
        name: str,
        entry: NodePlan,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        custom_nodes: Sequence[CustomNode],
        *,
        inside: Introspection = NO_INTROSPECTION,
    ) -> None:
        self.name = name
        self.metadata = ServableMetadata(name, _PLATFORM, inputs, outputs)
        self._entry = entry
        self._read = _RequestParser(inputs)
        self._custom_nodes = custom_nodes
        self.inside = inside

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run the pipeline and return all outputs in name order.

        The request's buffers must stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs, or a node's output does not fit the next node.
            CustomNodeFailure: a custom node failed.
            PipelineFailure: an output cannot be split or gathered.
            NothingToGather: a demultiplexer had nothing to split.
            ServerError: raised by a servable that a node calls.
        """
        inputs = await validated(self._read, request)
        outputs = await PipelineRun(self._entry, request)(inputs)
        named: list[Tensor | RawTensor] = [
            _named(name, outputs[name], keeps_rows=request.keeps_rows) for name in sorted(outputs)
        ]
        return InferResponse(self.name, _VERSION, named, request.id)

    async def aclose(self) -> None:
        """Close the custom nodes, shielded from cancellation. Called once, after the last call."""
        with trio.CancelScope(shield=True):
            for node in reversed(self._custom_nodes):
                await node.aclose()


def _named(name: str, output: Tensor, *, keeps_rows: bool) -> Tensor:
    """Rename an output; rows of bytes become strings if the pipeline's or the node's output name requires it."""
    if keeps_rows:
        return Tensor(name, output.datatype, output.array)
    tensor = rows_to_strings(output)
    return rows_to_strings(Tensor(name, tensor.datatype, tensor.array))


class _RequestParser:
    """Parser of one pipeline's requests; inputs of graphs are open: any datatype and shape."""

    __slots__ = ("_specs", "_validate")

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in inputs}
        self._validate = None if any(map(is_open, inputs)) else Validator(inputs)

    def __call__(self, request: InferRequest) -> dict[str, Tensor]:
        """Return the inputs by name. Arrays are read-only views of the request's raw buffers if these are aligned.

        Raises:
            InvalidRequest: the request does not fit the inputs.
        """
        if self._validate is not None:
            return {
                name: Tensor(name, self._specs[name].datatype, array) for name, array in self._validate(request).items()
            }
        given = {each.name: each for each in request.inputs}
        specs: dict[str, TensorSpec] = {}
        wrong = ErrorList()
        for name, spec in self._specs.items():
            with wrong:
                specs[name] = self._settle(spec, given.get(name))
        wrong.raise_if_any()
        arrays: dict[str, Array] = Validator(list(specs.values()))(request)
        return {name: Tensor(name, specs[name].datatype, array) for name, array in arrays.items()}

    def _settle(self, spec: TensorSpec, given: InferInput | None) -> TensorSpec:
        if given is None or not is_open(spec):
            return spec
        datatype: Datatype | None = BY_NAME.get(given.datatype)
        if datatype is None:
            raise input_mismatch("Invalid input precision", f"one of {', '.join(BY_NAME)}", given.datatype, spec)
        return TensorSpec(spec.name, datatype, tuple(map(Dim.fixed, given.shape)), batch_axis=None)
