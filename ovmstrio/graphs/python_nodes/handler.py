"""A loaded Python node: its ``OvmsPythonModel``, from the import of its file to ``finalize``, and its errors."""

from __future__ import annotations

import contextvars
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem, ServerError
from ovmstrio.core.tracing import current_span
from ovmstrio.graphs.calculator import ContractError, DefinitionScope, InstanceContext, NodeContract, NodeFailure
from ovmstrio.graphs.calculators.nodes import ports_of
from ovmstrio.graphs.graph_config import NodeConfig, Port, StreamRef
from ovmstrio.graphs.packets import REQUEST_PAYLOAD, RESPONSE_PAYLOAD
from ovmstrio.graphs.python_nodes.node_model import (
    FAILED,
    HookPair,
    NodeModel,
    NodeOutline,
    Outputs,
    WrongOutputError,
    as_tensors,
    routed,
    routed_yield,
    tensor_of,
    tensor_row,
    unexpected_result,
)
from ovmstrio.isolation.generators import AsyncPump, End, Failed, Pump, ThreadPump
from ovmstrio.isolation.importing import ROOT
from ovmstrio.isolation.isolated_code import CodeWorker, IsolatedCode, Isolation, RemoteGenerator
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import (
    SourceLine,
    UserCodeRaisedError,
    at_place,
    call_user_code,
    describe,
    missing_module_fix,
    place_in,
    place_of,
    trimmed,
)
from ovmstrio.isolation.worker_process import WorkerEnded
from ovmstrio.util.stdio import code_names, running_code_of
from pyovms import Context, Tensor
from pyovms.context import CURRENT

__all__ = [
    "EXECUTION_ERROR",
    "FINALIZE_SECONDS",
    "LOOPBACK",
    "OPTIONS",
    "InstanceCode",
    "NodeCode",
    "NodeHandler",
    "NodeInProcesses",
    "NodeInThreads",
    "UserCode",
    "contract_of",
    "handler_path_of",
    "has_loopback",
]

# ----------------------------------------------------------------------
# What a node must look like for its calculator to be PythonExecutorCalculator; the rules are OVMS's
# ----------------------------------------------------------------------

LOOPBACK: Final = Port("LOOPBACK", 0)
OPTIONS: Final = "mediapipe.PythonExecutorCalculatorOptions"
_RESOURCES: Final = Port("PYTHON_NODE_RESOURCES", 0)
_NAME: Final = "PythonExecutorCalculator"
_SIDE_FIX: Final = 'write input_side_packet: "PYTHON_NODE_RESOURCES:py"'
_OPTIONS_FIX: Final = f'add node_options {{ [type.googleapis.com/{OPTIONS}]: {{ handler_path: "handler.py" }} }}'


def contract_of(node: NodeConfig) -> NodeContract:
    """Say what the node's streams carry: tensors, and truth values on the loopback.

    Raises:
        ContractError: the node is not written as it must be.
    """
    _check_streams(node)
    _check_side_packets(node)
    _check_loopback(node)
    handler_path_of(node)
    _check_name(node)
    side: dict[Port, type] = {_RESOURCES: object}
    return NodeContract(_types(node.inputs), _types(node.outputs), side)


def has_loopback(node: NodeConfig) -> bool:
    """Tell whether the node has the cycle that generators need."""
    return LOOPBACK in ports_of(node.inputs)


def handler_path_of(node: NodeConfig) -> str:
    """Give the handler's path as the file has it.

    Raises:
        ContractError: the node's options do not say it.
    """
    missing = "The Python Node is missing options definition"
    if not node.node_options:
        hint = "; options { ... } is not looked at" if node.options else ""
        raise ContractError(f"{missing} - node_options is empty{hint}", fix=_OPTIONS_FIX)
    options: Any = node.node_options[0]
    found = options.DESCRIPTOR.full_name
    if found != OPTIONS:
        raise ContractError(f"{missing} - expected {OPTIONS} in node_options, found {found}", fix=_OPTIONS_FIX)
    path: str = options.handler_path
    if not path:
        raise ContractError(f"{missing} - handler_path is empty", fix="name the Python file in handler_path")
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
                    f'Tag "{port.tag}" index {port.index} was not expected: {_NAME} takes one stream of each tag, and '
                    f'{what} "{name}" is another',
                    fix=f'give it a tag of its own, such as {what}_stream: "{port.tag}{port.index}:{name}"',
                )
    if node.side_outputs:
        raise ContractError(f"{_NAME} makes no side packets", fix="remove output_side_packet")


def _check_side_packets(node: NodeConfig) -> None:
    if _RESOURCES not in ports_of(node.side_inputs):
        raise ContractError('Failed to get tag "PYTHON_NODE_RESOURCES" index 0 of the side packets', fix=_SIDE_FIX)
    for ref in node.side_inputs:
        if ref.port != _RESOURCES:
            raise ContractError(
                f'Tag "{ref.port.tag}" index {ref.port.index} was not expected among the side packets',
                fix=f'remove input_side_packet "{ref.name}"; {_NAME} takes no other than PYTHON_NODE_RESOURCES:py',
            )


def _check_loopback(node: NodeConfig) -> None:
    has_input, has_output = LOOPBACK in ports_of(node.inputs), LOOPBACK in ports_of(node.outputs)
    if has_input != has_output:
        missing = "output" if has_input else "input"
        raise ContractError(
            "If LOOPBACK is used, it must be defined on both input and output of the node",
            fix=f'add {missing}_stream: "LOOPBACK:loopback", with the same name on both sides',
        )


def _check_name(node: NodeConfig) -> None:
    if not node.name:
        raise ContractError(
            "The Python Node is missing name definition", fix='add name: "...", which is unique in the graph'
        )
    if node.canonical_name != node.name:
        raise ContractError(
            f"The Python Node name is already present in nodes list - {node.name!r}",
            fix="give each node of the graph a name of its own",
        )


# ----------------------------------------------------------------------
# Where the user's object of a Python node lives, and how it is called there: one port, whatever the place
# ----------------------------------------------------------------------


class InstanceCode(Protocol):
    """The object's calls for one call or stream.

    All raise ``UserCodeRaisedError`` with what the user's code raised, ``WorkerEnded`` if its process has ended, and
    are told to stop when they are cancelled.
    """

    async def open(self) -> None:
        """Run the hook ``open``, where there is one."""
        ...

    async def execute(self, inputs: list[Tensor]) -> Outputs | Pump[Outputs]:
        """Run ``execute``; a generator that it gives is the caller's to close.

        Raises:
            UserCodeRaisedError: with a ``WrongOutputError`` if it gave what cannot be sent.
        """
        ...

    def stop(self) -> None:
        """Tell the context that nobody wants a result any more."""
        ...

    async def close(self) -> None:
        """Run the hook ``close``, where there is one, and forget the instance."""
        ...


class NodeCode(Protocol):
    """The object."""

    async def load(self) -> None:
        """Make it and initialize it.

        Raises:
            UserCodeRaisedError: the user's code raised, or is not there (a ``ConfigError``).
            WorkerEnded: its process ended.
            OSError: no process can be started.
        """
        ...

    async def finalize(self) -> None:
        """Run ``finalize``, where it has one.

        Raises:
            UserCodeRaisedError: it raised.
            RuntimeError: it cannot run any more.
        """
        ...

    async def aclose(self) -> None:
        """Forget everything.  Cancellation: shielded, for it is bounded."""
        ...

    def instance(self, context: InstanceContext) -> InstanceCode:
        """Make what calls it for one call or stream."""
        ...

    def place_of(self, method: str) -> SourceLine | None:
        """Give the line where a method is defined, if that is known."""
        ...


# ----------------------------------------------------------------------
# The object of a Python node in this process: plain code in worker threads, async code on the event loop
# ----------------------------------------------------------------------


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


# ----------------------------------------------------------------------
# The object of a Python node in worker processes, one in each
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_HOSTED: Final = "ovmstrio.graphs.python_nodes.hosted_node:host_node"
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


# ----------------------------------------------------------------------
# A loaded Python node: its ``OvmsPythonModel``, from the import of its file to ``finalize``, and its errors
# ----------------------------------------------------------------------

FINALIZE_SECONDS: Final = 10.0
"""How long ``finalize`` may take."""
_PACKAGE: Final = re.compile(rf"\b{re.escape(ROOT)}\.n\d+\.")
"""The names of packages that handlers are loaded in, of which users know nothing."""


class NodeHandler:
    """The user's object behind a Python node, from its import to its end.

    Attributes:
        code: where it lives.
    """

    def __init__(self, node: NodeConfig, file: Path, scope: DefinitionScope) -> None:
        self.node = node
        self.grace_seconds = scope.threads.grace_seconds
        self.has_loopback = has_loopback(node)
        self.input_count = len(node.inputs) - self.has_loopback
        self.user_code = UserCode(scope.graph, node.name, file.parent, hide_errors=scope.hide_errors)
        self.code = _code_of(node, file, scope)
        self._file = file

    @property
    def model(self) -> Any:
        """The user's object, where it is in this process; None before it is made and after the end."""
        return self.code.made.model if isinstance(self.code, NodeInThreads) else None

    # Life

    async def load(self) -> None:
        """Import the file, make the object and initialize it.

        Raises:
            ConfigError: any of these fails.

        Cancellation: as :meth:`WorkerThreads.call`, or at once; the caller closes what was made.
        """
        try:
            await self.code.load()
        except UserCodeRaisedError as raised:
            if isinstance(raised.error, ConfigError):
                raise raised.error from None
            raise self._failed(raised.error) from None
        except (WorkerEnded, OSError) as error:
            message = f"Error during python node initialization for handler_path: {self._file} - its worker process"
            raise self._problem(f"{message} {error}") from None

    async def aclose(self) -> None:
        """Finalize the object, if there is one, and forget its modules; errors are logged.

        Cancellation: shielded, for ``FINALIZE_SECONDS`` and the pool's grace.
        """
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FINALIZE_SECONDS) as scope:
            try:
                await self.code.finalize()
            except UserCodeRaisedError as raised:
                self.user_code.report(raised.error, "finalize")
            except RuntimeError as error:
                log.error("finalize cannot run", reason=str(error), **self._names())  # noqa: TRY400 - no bug of its own
        if scope.cancelled_caught:
            log.error("finalize did not end in time", seconds=FINALIZE_SECONDS, **self._names())
        with trio.CancelScope(shield=True):
            await self.code.aclose()

    # Words

    def _failed(self, error: BaseException) -> ConfigError:
        self.user_code.report(error, "loading")
        place = self.user_code.place(error)
        reason = _PACKAGE.sub("", describe(error))
        message = f"Error during python node initialization for handler_path: {self._file} - {reason}"
        return self._problem(message, place, missing_module_fix(error))

    def _problem(self, message: str, place: SourceLine | None = None, fix: str = "") -> ConfigError:
        file, line = (str(self._file), None) if place is None else place
        path = f"node {self.node.name!r}"
        return ConfigError([Problem(f"{FAILED} - {message}", file=file, line=line, path=path, suggestion=fix)])

    def _names(self) -> dict[str, str]:
        return {"servable": self.user_code.graph, "node": self.node.name}


def _code_of(node: NodeConfig, file: Path, scope: DefinitionScope) -> NodeInThreads | NodeInProcesses:
    inputs, outputs = ([ref.name for ref in refs] for refs in (node.inputs, node.outputs))
    documents = next((ref.name for ref in node.outputs if ref.port.tag in {RESPONSE_PAYLOAD, REQUEST_PAYLOAD}), "")
    outline = NodeOutline(node.name, str(file), inputs, outputs, has_loopback(node), documents)
    ports = {ref.name: ref.port for ref in node.outputs}
    if scope.isolation is None or scope.tasks is None:
        return NodeInThreads(outline, ports, scope.threads, scope.graph)
    return NodeInProcesses(outline, ports, scope.isolation, scope.tasks, scope.graph)


EXECUTION_ERROR: Final = "Error occurred during graph execution"


class UserCode:
    """Whose code it is that fails: names for the log, the folder in which its files lie."""

    __slots__ = ("folder", "graph", "hide_errors", "node")

    def __init__(self, graph: str, node: str, folder: Path, *, hide_errors: bool = False) -> None:
        self.graph = graph
        self.node = node
        self.folder = folder
        self.hide_errors = hide_errors

    def failure(
        self, error: BaseException, step: str, *, request_id: str = "", otherwise: SourceLine | None = None
    ) -> Exception:
        """Log what user code raised and make of it what is raised instead: errors of the server's own pass unchanged.

        ``otherwise`` is the place to name where no line of the user's was reached.
        """
        self.report(error, step, request_id=request_id)
        if isinstance(error, ServerError):
            return error
        told = type(error).__name__ if self.hide_errors else at_place(describe(error), self.place(error) or otherwise)
        return NodeFailure(f"{EXECUTION_ERROR}: {told}")

    def report(self, error: BaseException, step: str, *, request_id: str = "") -> None:
        """Log what user code raised, with the traceback of the user's own frames."""
        log.error(
            "a Python node raised",
            step=step,
            servable=self.graph,
            node=self.node,
            request_id=request_id,
            exc_info=(type(error), error, trimmed(error)),
        )

    def wrong(self, problem: object) -> NodeFailure:
        """Make the failure of user code that gave back something wrong."""
        return NodeFailure(EXECUTION_ERROR if self.hide_errors else f"{EXECUTION_ERROR}: {problem}")

    def place(self, error: BaseException) -> SourceLine | None:
        """Give the line of the user's that an error comes from: the innermost in the handler's folder."""
        return place_in(self.folder, error)
