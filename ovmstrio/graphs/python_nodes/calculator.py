"""The PythonExecutorCalculator: Python nodes, their validation, execution in threads or processes, and errors."""

from __future__ import annotations

import contextvars
import inspect
import itertools
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem, ServerError, error_type
from ovmstrio.core.tracing import current_span
from ovmstrio.graphs.calculator import (
    CalculatorKind,
    ContractError,
    DefinitionScope,
    InstanceContext,
    NodeContext,
    NodeContract,
    NodeFailure,
)
from ovmstrio.graphs.calculators.nodes import ports_of
from ovmstrio.graphs.graph_config import NodeConfig, Port, StreamRef
from ovmstrio.graphs.packets import REQUEST_PAYLOAD_TAG, RESPONSE_PAYLOAD_TAG
from ovmstrio.graphs.python_nodes.api import Context, Tensor
from ovmstrio.graphs.python_nodes.api.context import CURRENT
from ovmstrio.graphs.python_nodes.node_model import (
    INITIALIZATION_FAILED,
    HookState,
    InvalidOutputError,
    NodeDescription,
    NodeModel,
    Outputs,
    documents_to_tensors,
    route_tensors,
    route_yielded_tensors,
    tensor_from_row,
    tensor_to_row,
    unexpected_result_error,
)
from ovmstrio.isolation.generators import End, Failed, LoopGenerator, PulledGenerator, ThreadGenerator
from ovmstrio.isolation.handler_imports import ROOT
from ovmstrio.isolation.isolated_code import CodeWorker, IsolatedCode, Isolation, RemoteGenerator
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import (
    SourceLine,
    UserCodeRaisedError,
    append_location,
    call_user_code,
    definition_location,
    describe_error,
    error_location,
    missing_module_hint,
    trim_traceback,
)
from ovmstrio.isolation.worker_process import WorkerExited
from ovmstrio.util.stdio import attribute_output_to, code_names

# ----------------------------------------------------------------------
# Nodes
# ----------------------------------------------------------------------

# Node configuration; the rules are OVMS's

LOOPBACK: Final = Port("LOOPBACK", 0)
_PYTHON_OPTIONS: Final = "mediapipe.PythonExecutorCalculatorOptions"
_RESOURCES: Final = Port("PYTHON_NODE_RESOURCES", 0)
_NAME: Final = "PythonExecutorCalculator"
_SIDE_FIX: Final = 'write input_side_packet: "PYTHON_NODE_RESOURCES:py"'
_OPTIONS_FIX: Final = (
    f'add node_options {{ [type.googleapis.com/{_PYTHON_OPTIONS}]: {{ handler_path: "handler.py" }} }}'
)


def python_node_contract(node: NodeConfig) -> NodeContract:
    """Return the contract of a Python node: tensors, and booleans on the loopback."""
    _check_streams(node)
    _check_side_packets(node)
    _check_loopback(node)
    handler_path_of(node)
    _check_name(node)
    side: dict[Port, type] = {_RESOURCES: object}
    return NodeContract(_types(node.inputs), _types(node.outputs), side)


def _has_loopback(node: NodeConfig) -> bool:
    return LOOPBACK in ports_of(node.inputs)


def handler_path_of(node: NodeConfig) -> str:
    """Return the handler path as written in the graph file."""
    missing = "The Python Node is missing options definition"
    if not node.node_options:
        hint = "; options { ... } is ignored" if node.options else ""
        raise ContractError(f"{missing} - node_options is empty{hint}", fix=_OPTIONS_FIX)
    options: Any = node.node_options[0]
    found = options.DESCRIPTOR.full_name
    if found != _PYTHON_OPTIONS:
        raise ContractError(f"{missing} - expected {_PYTHON_OPTIONS} in node_options, found {found}", fix=_OPTIONS_FIX)
    path: str = options.handler_path
    if not path:
        raise ContractError(f"{missing} - handler_path is empty", fix="set handler_path to the Python file")
    return path


def _types(refs: Sequence[StreamRef]) -> dict[Port, type]:
    return {port: bool if port == LOOPBACK else Tensor for port in ports_of(refs)}


def _check_streams(node: NodeConfig) -> None:
    for what, refs in (("input", node.inputs), ("output", node.outputs)):
        if not refs:
            raise ContractError(
                f"{_NAME} needs at least one {what} stream", fix=f'add {what}_stream: "TAG:name"', code="INTERNAL"
            )
        for port, name in ((ref.port, ref.name) for ref in refs):
            if port.index:
                raise ContractError(
                    f'Tag "{port.tag}" index {port.index} was not expected: {_NAME} accepts one stream per tag, '
                    f'{what} "{name}" repeats the tag',
                    fix=f'use a unique tag, such as {what}_stream: "{port.tag}{port.index}:{name}"',
                )
    if node.side_outputs:
        raise ContractError(f"{_NAME} has no output side packets", fix="remove output_side_packet")


def _check_side_packets(node: NodeConfig) -> None:
    if _RESOURCES not in ports_of(node.side_inputs):
        raise ContractError('Failed to get tag "PYTHON_NODE_RESOURCES" index 0 of the side packets', fix=_SIDE_FIX)
    for ref in node.side_inputs:
        if ref.port != _RESOURCES:
            raise ContractError(
                f'Tag "{ref.port.tag}" index {ref.port.index} was not expected among the side packets',
                fix=f'remove input_side_packet "{ref.name}"; {_NAME} accepts only PYTHON_NODE_RESOURCES:py',
            )


def _check_loopback(node: NodeConfig) -> None:
    has_input, has_output = LOOPBACK in ports_of(node.inputs), LOOPBACK in ports_of(node.outputs)
    if has_input != has_output:
        missing = "output" if has_input else "input"
        raise ContractError(
            "If LOOPBACK is used, it must be defined on both input and output of the node",
            fix=f'add {missing}_stream: "LOOPBACK:loopback", with the same stream name on both sides',
        )


def _check_name(node: NodeConfig) -> None:
    if not node.name:
        raise ContractError("The Python Node is missing name definition", fix='add name: "...", unique in the graph')
    if node.canonical_name != node.name:
        raise ContractError(
            f"The Python Node name is already present in nodes list - {node.name!r}",
            fix="give each node a unique name",
        )


# Execution of user code, in this process or in worker processes


class InstanceCode(Protocol):
    """User code of a node for one call or stream.

    All methods raise ``UserCodeRaisedError`` with the user's exception, or ``WorkerExited`` if the worker process has
    ended. Cancelling them stops the user code.
    """

    async def open(self) -> None:
        """Run the ``open`` hook, if there is one."""
        ...

    async def execute(self, inputs: list[Tensor]) -> Outputs | PulledGenerator[Outputs]:
        """Run ``execute``; the caller closes a generator.

        Raises:
            UserCodeRaisedError: with a ``InvalidOutputError`` if the result cannot be sent.
        """
        ...

    def stop(self) -> None:
        """Mark the call as cancelled in the user's context."""
        ...

    async def close(self) -> None:
        """Run the ``close`` hook, if there is one, and release the instance."""
        ...


class NodeCode(Protocol):
    """User code of a node: one object per process."""

    async def load(self) -> None:
        """Create and initialize the object.

        Raises:
            UserCodeRaisedError: the user code raised or is missing (a ``ConfigError``).
            WorkerExited: the worker process ended.
            OSError: no worker process can be started.
        """
        ...

    async def finalize(self) -> None:
        """Run ``finalize``, if there is one.

        Raises:
            UserCodeRaisedError: ``finalize`` raised.
            RuntimeError: ``finalize`` cannot run any more.
        """
        ...

    async def aclose(self) -> None:
        """Release everything; shielded, because the time is bounded."""
        ...

    def instance(self, context: InstanceContext) -> InstanceCode:
        """Create the calls for one call or stream."""
        ...

    def place_of(self, method: str) -> SourceLine | None:
        """Return the source line of a method, if known."""
        ...


# Execution in threads and on the event loop


class _ThreadedNode:
    """User code in this process: worker threads, or the event loop for async code. See :class:`NodeCode`.

    Args:
        outline: description of the node.
        ports: output ports by stream name.
        threads: runs synchronous code.
        graph: the graph's name, for captured output.
    """

    def __init__(self, outline: NodeDescription, ports: Mapping[str, Port], threads: WorkerThreads, graph: str) -> None:
        self.names = {"servable": graph, "node": outline.node}
        self.node_model = NodeModel(outline)
        self.ports = ports
        self.threads = threads
        self.has_loopback = outline.has_loopback
        self.documents = outline.documents

    async def load(self) -> None:
        with attribute_output_to(self.names):
            await call_user_code(self.threads, self.node_model.make)
            await call_user_code(self.threads, self.node_model.initialize)

    async def finalize(self) -> None:
        finalize = self.node_model.method("finalize")
        if finalize is None:
            return
        if self.node_model.is_initializing:
            raise RuntimeError("initialize has not ended")
        with attribute_output_to(self.names):
            await call_user_code(self.threads, finalize)

    async def aclose(self) -> None:
        self.node_model.unload()

    def instance(self, context: InstanceContext) -> _ThreadedInstance:
        return _ThreadedInstance(self, context)

    def place_of(self, method: str) -> SourceLine | None:
        found = self.node_model.method(method)
        return None if found is None else definition_location(found)


class _ThreadedInstance:
    def __init__(self, node: _ThreadedNode, instance: InstanceContext) -> None:
        self._node = node
        self._instance = instance
        seconds = math.inf if instance.deadline == math.inf else instance.deadline - trio.current_time()
        self._context = Context(instance.parameters, instance.request_id, seconds, self._is_cancelled)
        self._variables = contextvars.copy_context()
        self._variables.run(CURRENT.set, self._context)
        self._variables.run(code_names.set, node.names)
        self._is_stopped = False
        self._pair = HookState()

    async def open(self) -> None:
        hook = self._node.node_model.hooks.get("open")
        if hook is None:
            self._pair.begin()
        else:
            await self._call(self._pair.opening(hook), self._context)

    async def close(self) -> None:
        hook = self._node.node_model.hooks.get("close")
        if self._pair.end() and hook is not None:
            await self._call(hook, self._context)

    async def execute(self, inputs: list[Tensor]) -> Outputs | PulledGenerator[Outputs]:
        node = self._node
        result = await self._call(node.node_model.model.execute, inputs)
        if result is None:
            return []  # execute has no return statement
        try:
            result = documents_to_tensors(result, node.documents)
            if isinstance(result, list):
                return route_tensors(result, node.ports, "execute returned a list")
            return self._make_pump(result)
        except InvalidOutputError as error:
            raise UserCodeRaisedError(error) from None

    def _make_pump(self, result: Any) -> PulledGenerator[Outputs]:
        node = self._node
        is_async = inspect.isasyncgen(result)
        if not node.has_loopback or not (is_async or hasattr(result, "__next__")):
            raise unexpected_result_error(result)

        def convert(value: Any) -> Outputs:
            return route_yielded_tensors(documents_to_tensors(value, node.documents), node.ports)

        if is_async:
            around = partial(_node_context, self._variables)
            return LoopGenerator(result, convert, node.threads.grace_seconds, around)
        return ThreadGenerator(result, convert, node.threads, self._variables)

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        span = current_span.get()
        if span is not None:
            # The instance was created outside this run's span.
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
    """Set ``current_context()`` and the log names on the event loop as in ``context``."""
    current = context.get(CURRENT)
    if current is None:
        yield
        return
    token = CURRENT.set(current)
    try:
        with attribute_output_to(context.get(code_names)):
            yield
    finally:
        CURRENT.reset(token)


# Execution in worker processes

log = structlog.get_logger(__name__)

_HOSTED: Final = "ovmstrio.graphs.python_nodes.hosted_node:host_node"
_CLOSE_SECONDS: Final = 2.0


class _IsolatedNode:
    """User code in worker processes, one object in each. See :class:`NodeCode`.

    Args:
        outline: description of the node.
        ports: output ports by stream name.
        isolation: number and limits of the processes.
        tasks: runs the processes; outlives the node.
        graph: the graph's name, for the log.
    """

    def __init__(
        self,
        outline: NodeDescription,
        ports: Mapping[str, Port],
        isolation: Isolation,
        tasks: trio.Nursery,
        graph: str,
    ) -> None:
        self.ports = ports
        self.instance_numbers = itertools.count(1)
        self.hooks: frozenset[str] = frozenset()
        self._tasks = tasks
        self._places: dict[str, Any] = {}
        names = {"servable": graph, "node": outline.node}
        self.code = IsolatedCode(isolation, _HOSTED, list(outline), prepare=self._prepare, names=names)
        self._names = names
        self._raised: list[BaseException] = []

    async def load(self) -> None:
        await self._tasks.start(self.code.run)

    async def _prepare(self, worker: CodeWorker) -> None:
        made = await worker.call("make", None, has_time_limit=False)
        self.hooks = frozenset(made["hooks"])
        self._places = made["places"]
        try:
            await worker.call("initialize", None, has_time_limit=False)
        except UserCodeRaisedError:
            await self._finalize(worker)  # release what initialize has acquired
            raise

    async def finalize(self) -> None:
        await self.code.aclose(self._finalize, _CLOSE_SECONDS)
        if self._raised:
            raise UserCodeRaisedError(self._raised.pop())

    async def _finalize(self, worker: CodeWorker) -> None:
        # A cancelled call may still be stopping.
        with trio.move_on_after(_CLOSE_SECONDS):
            await worker.process.idle()
        # A call that does not stop can block the process for ever.
        patience = _CLOSE_SECONDS if worker.process.is_busy else math.inf
        with trio.move_on_after(patience) as scope:
            try:
                await worker.call("finalize", None, has_time_limit=False)
            except UserCodeRaisedError as raised:
                self._raised.append(raised.error)
            except WorkerExited as end:
                log.error("finalize not run", reason=end.why, **self._names)  # noqa: TRY400 - not a bug of the server
        if scope.cancelled_caught:
            log.error("finalize not run", reason="a cancelled call does not end", **self._names)

    async def aclose(self) -> None:
        await self.code.aclose(_do_nothing, _CLOSE_SECONDS)

    def instance(self, context: InstanceContext) -> _IsolatedInstance:
        return _IsolatedInstance(self, context)

    def place_of(self, method: str) -> SourceLine | None:
        place = self._places.get(method)
        return None if place is None else SourceLine(*place)

    def outputs(self, rows: Iterable[Any]) -> Outputs:
        tensors = [tensor_from_row(row) for row in rows]
        return [(self.ports[tensor.name], tensor) for tensor in tensors]


async def _do_nothing(worker: CodeWorker) -> None:
    """Finalize nothing."""


class _IsolatedInstance:
    """Calls of one instance; all go to one process as long as it lives or holds state of the instance."""

    def __init__(self, node: _IsolatedNode, instance: InstanceContext) -> None:
        self._node = node
        self._instance = instance
        self._number = next(node.instance_numbers)
        self._worker: CodeWorker | None = None
        self._is_kept = False

    async def open(self) -> None:
        if "open" in self._node.hooks:
            try:
                await self._call("open")
            except UserCodeRaisedError:
                self._forget()
                raise

    async def execute(self, inputs: list[Tensor]) -> Outputs | PulledGenerator[Outputs]:
        result = await self._call("execute", [tensor_to_row(tensor) for tensor in inputs])
        if isinstance(result, RemoteGenerator):
            return _IsolatedPump(result, self._node)
        self._is_kept, rows = result
        return self._node.outputs(rows)

    async def _call(self, method: str, *more: Any) -> Any:
        value = [self._number, self._call_arguments(), *more]
        while True:
            if self._worker is None or (self._worker.process.is_retired and not self._is_kept):
                self._worker = await self._node.code.worker()
            # A call that fails or is cancelled leaves its state in the process, so that `close` must release it.
            was_kept, self._is_kept = self._is_kept, True
            try:
                return await self._worker.call(method, value)
            except WorkerExited as end:
                if end.was_called or was_kept:
                    raise
                self._worker, self._is_kept = None, False

    def _call_arguments(self) -> list[Any]:
        instance = self._instance
        seconds = None if instance.deadline == math.inf else instance.deadline - trio.current_time()
        return [dict(instance.parameters), instance.request_id, seconds]

    def stop(self) -> None:
        """Do nothing: cancelling the call or closing the generator notifies the process."""

    async def close(self) -> None:
        worker = self._worker
        if worker is None or not self._is_kept:
            return
        try:
            if "close" in self._node.hooks:
                await worker.call("close", [self._number, self._call_arguments()])
        finally:
            self._forget()

    def _forget(self) -> None:
        if self._worker is not None:
            self._worker.forget(self._number)
            self._is_kept = False


class _IsolatedPump:
    def __init__(self, generator: RemoteGenerator, node: _IsolatedNode) -> None:
        self._generator = generator
        self._convert = partial(node.outputs)

    async def pull(self) -> Outputs | End | Failed:
        item = await self._generator.pull()
        return item if isinstance(item, End | Failed) else self._convert(item)

    async def aclose(self) -> BaseException | None:
        return await self._generator.aclose()


# Life cycle and errors

FINALIZE_SECONDS: Final = 10.0
"""Time limit of ``finalize``."""
_PACKAGE: Final = re.compile(rf"\b{re.escape(ROOT)}\.n\d+\.")
"""Internal package names of handlers, removed from messages."""


class NodeHandler:
    """User code of a Python node from import to ``finalize``.

    Attributes:
        code: the execution in threads or processes.
    """

    def __init__(self, node: NodeConfig, file: Path, scope: DefinitionScope) -> None:
        self.node = node
        self.grace_seconds = scope.threads.grace_seconds
        self.has_loopback = _has_loopback(node)
        self.input_count = len(node.inputs) - self.has_loopback
        self.user_code = _UserCode(scope.graph, node.name, file.parent, hide_errors=scope.hide_errors)
        self.code = _code_of(node, file, scope)
        self._file = file

    @property
    def model(self) -> Any:
        """The user's object if it runs in this process; None before loading and after closing."""
        return self.code.node_model.model if isinstance(self.code, _ThreadedNode) else None

    # Life

    async def load(self) -> None:
        """Import the file, create the object and initialize it; the caller closes the handler after an error."""
        try:
            await self.code.load()
        except UserCodeRaisedError as raised:
            if isinstance(raised.error, ConfigError):
                raise raised.error from None
            raise self._failed(raised.error) from None
        except (WorkerExited, OSError) as error:
            message = f"Error during python node initialization for handler_path: {self._file} - its worker process"
            raise self._problem(f"{message} {error}") from None

    async def aclose(self) -> None:
        """Finalize the object and release its modules; log errors.

        Shielded from cancellation for ``FINALIZE_SECONDS`` plus the pool's grace period.
        """
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FINALIZE_SECONDS) as scope:
            try:
                await self.code.finalize()
            except UserCodeRaisedError as raised:
                self.user_code.report(raised.error, "finalize")
            except RuntimeError as error:
                log.error("finalize not run", reason=str(error), **self._names())  # noqa: TRY400 - not a bug
        if scope.cancelled_caught:
            log.error("finalize timed out", seconds=FINALIZE_SECONDS, **self._names())
        with trio.CancelScope(shield=True):
            await self.code.aclose()

    # Errors

    def _failed(self, error: BaseException) -> ConfigError:
        self.user_code.report(error, "loading")
        place = self.user_code.place(error)
        reason = _PACKAGE.sub("", describe_error(error))
        message = f"Error during python node initialization for handler_path: {self._file} - {reason}"
        return self._problem(message, place, missing_module_hint(error))

    def _problem(self, message: str, place: SourceLine | None = None, fix: str = "") -> ConfigError:
        file, line = (str(self._file), None) if place is None else place
        path = f"node {self.node.name!r}"
        return ConfigError(
            [Problem(f"{INITIALIZATION_FAILED} - {message}", file=file, line=line, path=path, suggestion=fix)]
        )

    def _names(self) -> dict[str, str]:
        return {"servable": self.user_code.graph, "node": self.node.name}


def _code_of(node: NodeConfig, file: Path, scope: DefinitionScope) -> _ThreadedNode | _IsolatedNode:
    inputs, outputs = ([ref.name for ref in refs] for refs in (node.inputs, node.outputs))
    documents = next(
        (ref.name for ref in node.outputs if ref.port.tag in {RESPONSE_PAYLOAD_TAG, REQUEST_PAYLOAD_TAG}), ""
    )
    outline = NodeDescription(node.name, str(file), inputs, outputs, _has_loopback(node), documents)
    ports = {ref.name: ref.port for ref in node.outputs}
    if scope.isolation is None or scope.tasks is None:
        return _ThreadedNode(outline, ports, scope.threads, scope.graph)
    return _IsolatedNode(outline, ports, scope.isolation, scope.tasks, scope.graph)


EXECUTION_ERROR: Final = "Error occurred during graph execution"


class _UserCode:
    """Error reporting for the user code of one node: names for the log and the handler's folder."""

    __slots__ = ("folder", "graph", "hide_errors", "node")

    def __init__(self, graph: str, node: str, folder: Path, *, hide_errors: bool = False) -> None:
        self.graph = graph
        self.node = node
        self.folder = folder
        self.hide_errors = hide_errors

    def execution_error(
        self, error: BaseException, step: str, *, request_id: str = "", otherwise: SourceLine | None = None
    ) -> Exception:
        """Log an exception of user code and return the error to raise; a ``ServerError`` is returned unchanged.

        ``otherwise`` is the source line to name if the traceback has no user frame.
        """
        self.report(error, step, request_id=request_id)
        if isinstance(error, ServerError):
            return error
        detail = (
            type(error).__name__
            if self.hide_errors
            else append_location(describe_error(error), self.place(error) or otherwise)
        )
        failure = NodeFailure(f"{EXECUTION_ERROR}: {detail}")
        failure.user_type = error_type(error)
        return failure

    def report(self, error: BaseException, step: str, *, request_id: str = "") -> None:
        log.error(
            "Python node raised",
            step=step,
            servable=self.graph,
            node=self.node,
            request_id=request_id,
            exc_info=(type(error), error, trim_traceback(error)),
        )

    def invalid_result(self, problem: object) -> NodeFailure:
        return NodeFailure(EXECUTION_ERROR if self.hide_errors else f"{EXECUTION_ERROR}: {problem}")

    def place(self, error: BaseException) -> SourceLine | None:
        return error_location(self.folder, error)


# ----------------------------------------------------------------------
# Calculator
# ----------------------------------------------------------------------

_T = TypeVar("_T")


_BUSY: Final = "Node is already processing data. Create new stream for another request."
_NOTHING_YIELDED: Final = "the generator of execute ended without yielding anything; yield [] to send nothing"


class _PythonCalculator:
    def __init__(self, handler: NodeHandler, context: NodeContext) -> None:
        instance = context.instance
        self._handler = handler
        self._instance = instance
        self._code = handler.code.instance(instance)
        self._pump: PulledGenerator[Outputs] | None = None
        self._timestamp = 0
        self._is_open = False

    # Life

    async def open(self) -> None:
        try:
            await self._call("open", self._code.open())
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self._close_handler()
            raise
        self._is_open = True

    async def close(self, context: NodeContext) -> None:
        del context
        pump, self._pump = self._pump, None
        if pump is not None:
            self._code.stop()
            error = await pump.aclose()
            if error is not None:
                self._handler.user_code.report(error, "closing a generator", request_id=self._instance.request_id)
        if self._is_open:
            self._is_open = False
            await self._close_handler()

    async def _close_handler(self) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._handler.grace_seconds) as scope:
            try:
                await self._call("close", self._code.close())
            except Exception:  # noqa: BLE001 - logged already
                return
        if scope.cancelled_caught:
            log.error("Python node close timed out", servable=self._instance.graph, node=self._handler.node.name)

    # Runs

    async def process(self, context: NodeContext) -> None:
        """Call ``execute``, or take the next value of its generator.

        Cancellation notifies user code in threads and waits for the grace period; on the event loop it cancels the user
        code; in worker processes it notifies the user code and does not wait.

        Raises:
            NodeFailure: user code raised or returned an invalid result, or data arrived while a generator runs.
            ServerError: user code raised it.
        """
        if self._pump is not None:
            if any(port != LOOPBACK for port in context.inputs):
                raise NodeFailure(_BUSY, "RESOURCE_EXHAUSTED")
            await self._send_next(context, self._pump)
            return
        inputs = [value for port, value in context.inputs.items() if port != LOOPBACK]
        if len(inputs) != self._handler.input_count:
            log.debug("Python node run with missing inputs", node=self._handler.node.name, given=len(inputs))
        result = await self._call("execute", self._code.execute(inputs))
        if isinstance(result, list):
            for port, tensor in result:
                context.emit(port, tensor)
        else:
            self._pump = result
            self._timestamp = context.timestamp
            await self._send_next(context, result, is_first=True)

    async def _send_next(self, context: NodeContext, pump: PulledGenerator[Outputs], *, is_first: bool = False) -> None:
        item = await pump.pull()
        if isinstance(item, End):
            self._pump = None
            if is_first:
                raise self._handler.user_code.invalid_result(_NOTHING_YIELDED)
        elif isinstance(item, Failed):
            raise self._failure(item.error, "execute")
        else:
            timestamp = self._timestamp
            for port, tensor in item:
                context.emit(port, tensor, timestamp)
            self._timestamp = timestamp + 1
            context.emit(LOOPBACK, value=True, timestamp=timestamp + 1)

    # User code

    async def _call(self, step: str, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except (UserCodeRaisedError, WorkerExited) as error:
            raise self._failure(error.error if isinstance(error, UserCodeRaisedError) else error, step) from None

    def _failure(self, error: BaseException, step: str) -> Exception:
        user_code = self._handler.user_code
        if isinstance(error, WorkerExited):
            return NodeFailure(f"{EXECUTION_ERROR}: the worker process of the node {error.why}")
        if isinstance(error, InvalidOutputError):
            return user_code.invalid_result(error)
        place = self._handler.code.place_of(step)
        return user_code.execution_error(error, step, request_id=self._instance.request_id, otherwise=place)


# PythonExecutorCalculator

_NO_FILE: Final = "The Python Node file path does not exist"


class _PythonNodeResources(NodeHandler):
    async def open(self, context: NodeContext) -> _PythonCalculator:
        calculator = _PythonCalculator(self, context)
        await calculator.open()
        return calculator


class _PythonExecutorKind:
    name: str = "PythonExecutorCalculator"

    def contract(self, node: NodeConfig) -> NodeContract:
        return python_node_contract(node)

    async def load(self, node: NodeConfig, scope: DefinitionScope) -> _PythonNodeResources:
        file = _find_handler(node, scope.directory)
        handler = _PythonNodeResources(node, file, scope)
        try:
            await handler.load()
        except BaseException:
            with trio.CancelScope(shield=True):
                await handler.aclose()
            raise
        return handler


def _find_handler(node: NodeConfig, directory: Path) -> Path:
    written = handler_path_of(node)
    # Normalize the text only: resolving symlinks (as in mounted ConfigMaps) would change the handler's folder.
    file = Path(os.path.normpath(directory.absolute() / written.replace("\\", "/")))
    if file.is_file():
        return file
    found = "is a folder" if file.is_dir() else "does not exist"
    problem = Problem(
        f"{_NO_FILE} - Python node handler_path: {file} {found}.",
        line=node.line or None,
        path=f"node {node.name!r}",
        suggestion=f"a relative handler_path starts at {directory}",
    )
    raise ConfigError([problem])


PYTHON_EXECUTOR: Final[CalculatorKind] = _PythonExecutorKind()
