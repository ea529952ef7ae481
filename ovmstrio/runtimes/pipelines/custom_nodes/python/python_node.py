"""A Python file as a custom node of one pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.tensor import Array
from ovmstrio.runtimes.pipelines.custom_nodes.custom_node import ItemInfo, read_only
from ovmstrio.runtimes.pipelines.custom_nodes.node_threads import node_threads
from ovmstrio.runtimes.pipelines.custom_nodes.python.file_failures import UserFile
from ovmstrio.runtimes.pipelines.custom_nodes.python.infos import WrongOutputsError, read_infos, read_outputs
from ovmstrio.runtimes.pipelines.custom_nodes.python.node_functions import Functions, UserFunction, find_functions
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_user_code
from ovmstrio.work.user_code.importing import HandlerPackage

__all__ = ["CLOSING_SECONDS", "PythonNode", "open_python_node"]

log = structlog.get_logger(__name__)

CLOSING_SECONDS: Final = 10.0
"""How long calls that were left, and then ``deinitialize``, may take at the end."""


class PythonNode:
    """A loaded file; see :class:`~ovmstrio.runtimes.pipelines.custom_nodes.custom_node.CustomNode`.

    Each node has modules of its own, so that nodes of one file share nothing.
    """

    def __init__(self, file: UserFile, params: Mapping[str, str]) -> None:
        self.inputs: Mapping[str, ItemInfo] = {}
        self.outputs: Mapping[str, ItemInfo] = {}
        self._file = file
        self._params = MappingProxyType(dict(params))
        self._threads = node_threads(file.name, f"custom node {file.name!r}")
        self._package = HandlerPackage(file.path.parent)
        self._functions: Functions | None = None
        self._manager: Any = None
        self._is_initialized = False

    # Life

    async def load(self, tasks: trio.Nursery) -> None:
        """Import the file, initialize it and ask what it takes and gives, in threads that ``tasks`` hosts.

        Raises:
            ConfigError: a function is missing, raises, or gives something that cannot be used.

        Cancellation: at once; the caller closes the node.
        """
        await tasks.start(self._threads.run)
        module = await self._load_by("NODE_LIBRARY_LOAD_FAILED_OPEN", "the file", self._package.load, self._file.path)
        self._functions = functions = find_functions(module, self._file)
        if functions.initialize is not None:
            initialize = functions.initialize.call
            code = "NODE_LIBRARY_INITIALIZE_FAILED"
            self._manager = await self._load_by(code, "initialize", initialize, self._params)
        self._is_initialized = True
        self.inputs = await self._ask(functions.get_inputs_info)
        self.outputs = await self._ask(functions.get_outputs_info)

    async def _load_by(self, code: str, step: str, function: Any, *args: Any) -> Any:
        try:
            return await self._run(function, *args)
        except UserCodeRaisedError as raised:
            raise self._file.raised_while_loading(raised.error, code, step) from None

    async def _ask(self, function: UserFunction) -> dict[str, ItemInfo]:
        args = function.arguments(self._manager, self._params)
        given = await self._load_by("NODE_LIBRARY_METADATA_FAILED", function.name, function.call, *args)
        return read_infos(given, function, self._file)

    async def aclose(self) -> None:
        """Deinitialize the file once no call is under way, and forget its modules; errors are logged.

        Cancellation: shielded, for ``CLOSING_SECONDS``.
        """
        functions = self._functions
        if functions is not None and functions.deinitialize is not None and self._is_initialized:
            self._is_initialized = False
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSING_SECONDS) as scope:
                await self._deinitialize(functions.deinitialize)
            if scope.cancelled_caught:
                log.error("a custom node could not be deinitialized in time", node=self._file.name)
        self._threads.close()
        self._package.unload()

    async def _deinitialize(self, function: UserFunction) -> None:
        await self._threads.idle()
        try:
            await self._run(function.call, self._manager)
        except UserCodeRaisedError as raised:
            self._file.report(raised.error, "deinitialize")

    # Calls

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once, in a worker thread unless ``execute`` is ``async def``.

        Raises:
            CustomNodeFailure: ``execute`` raised, or gave something that cannot be used.
            ServerError: what ``execute`` raised of the server's own.

        Cancellation: at once; ``async def`` is cancelled where it waits, and a thread ends by itself.
        """
        if self._functions is None:
            raise RuntimeError(f"custom node {self._file.name!r} is not loaded")
        function = self._functions.execute
        try:
            given = await self._run(function.call, *function.arguments(self._manager, read_only(inputs), self._params))
            return read_outputs(given)
        except UserCodeRaisedError as raised:
            raise self._file.failure(raised.error, function.call) from None
        except WrongOutputsError as wrong:
            raise self._file.wrong(wrong.code, str(wrong), function.call) from None

    async def _run(self, function: Any, *args: Any) -> Any:
        return await call_user_code(self._threads, function, args, may_leave=True)


async def open_python_node(
    path: Path, name: str, params: Mapping[str, str], *, tasks: trio.Nursery, hide_errors: bool = False
) -> PythonNode:
    """Load a Python file as a custom node; the caller owns it and closes it.

    Raises:
        ConfigError: there is no such file, or it cannot be used.

    Cancellation: at once; a node that was initialized is deinitialized.
    """
    file = UserFile(name, path, hide_errors=hide_errors)
    node = PythonNode(file, params)
    try:
        await node.load(tasks)
    except BaseException:
        with trio.CancelScope(shield=True):
            await node.aclose()
        raise
    return node
