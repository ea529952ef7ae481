"""The PythonExecutorCalculator: Python nodes in running graphs."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Final, TypeVar

import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.graphs.calculator import CalculatorKind, DefinitionScope, NodeContext, NodeContract, NodeFailure
from ovmstrio.graphs.graph_config import NodeConfig
from ovmstrio.graphs.python_nodes.handler import (
    EXECUTION_ERROR,
    LOOPBACK,
    NodeHandler,
    handler_path_of,
    python_node_contract,
)
from ovmstrio.graphs.python_nodes.node_model import InvalidOutputError, Outputs
from ovmstrio.isolation.generators import End, Failed, PulledGenerator
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.isolation.worker_process import WorkerExited

_T = TypeVar("_T")

log = structlog.get_logger(__name__)

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
