"""Custom nodes that are Python files, with the same contract as libraries in C.

::

    def initialize(params): ...                   optional; what it gives is the manager
    def get_inputs_info(params[, manager]): ...   {name: (element type, shape)}
    def get_outputs_info(params[, manager]): ...  the same
    def execute(inputs, params[, manager]): ...   {name: array} of inputs to {name: array} of outputs
    def deinitialize(manager): ...                optional

Each may be ``async def``.  Plain functions run in worker threads, several calls at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem, ServerError
from ovmstrio.core.tensor import BY_NAME, BY_OPENVINO_NAME, BYTES, Array, Datatype
from ovmstrio.isolation.importing import HandlerPackage
from ovmstrio.isolation.user_code import (
    SourceLine,
    UserCodeRaisedError,
    at_place,
    call_user_code,
    describe,
    place_in,
    place_of,
    trimmed,
)
from ovmstrio.pipelines.custom_node import ItemInfo, node_threads, read_only
from ovmstrio.pipelines.native.library import NodeIdentity

__all__ = [
    "CLOSING_SECONDS",
    "DATATYPE_OF",
    "Functions",
    "PythonNode",
    "UserFile",
    "UserFunction",
    "WrongOutputsError",
    "find_functions",
    "open_python_node",
    "read_infos",
    "read_outputs",
]

# ----------------------------------------------------------------------
# What operators and clients are told when the Python file of a custom node fails
# ----------------------------------------------------------------------

log = structlog.get_logger(__name__)

_EXECUTION: Final = "NODE_LIBRARY_EXECUTION_FAILED"


class UserFile(NodeIdentity):
    """The file of one node, for messages; clients are told only the type of what it raises if errors are hidden."""

    def __init__(self, node: str, path: Path, *, hide_errors: bool = False) -> None:
        super().__init__(node, path)
        self._hide_errors = hide_errors

    def report(self, error: BaseException, step: str) -> None:
        """Log what user code raised, with the traceback of the user's own frames."""
        exc_info = (type(error), error, trimmed(error))
        log.error("a custom node raised", node=self.name, file=str(self.path), step=step, exc_info=exc_info)

    def failure(self, error: BaseException, function: Callable[..., Any]) -> ServerError:
        """Log what ``execute`` raised and make the error of the call: errors of the server's own pass unchanged."""
        self.report(error, "execute")
        if isinstance(error, ServerError):
            return error
        if self._hide_errors:
            return self.failed(_EXECUTION, type(error).__name__)
        return self.failed(
            _EXECUTION, at_place(describe(error), place_in(self.path.parent, error) or place_of(function))
        )

    def wrong(self, code: str, detail: str, function: Callable[..., Any]) -> CustomNodeFailure:
        """Make the error of a call that gave something that cannot be used."""
        failure = self.failed(code, at_place(detail, place_of(function)))
        log.error("a custom node gave wrong outputs", node=self.name, file=str(self.path), reason=str(failure))
        return failure

    def raised_while_loading(self, error: BaseException, code: str, step: str) -> ServerError:
        """Log what user code raised while it was loaded, and make the error of loading."""
        self.report(error, step)
        if isinstance(error, ConfigError):
            return error
        place = place_in(self.path.parent, error)
        line = self.line_of(place)
        told = at_place(describe(error), place if line is None else None)
        return ConfigError([self.problem(code, f"{step} raised {told}", line=line)])

    def line_of(self, place: SourceLine | None) -> int | None:
        """Give the line of a place, if it is in the file."""
        return place.line if place is not None and place.file == str(self.path) else None


# ----------------------------------------------------------------------
# The functions that the Python file of a custom node must have, and may have
# ----------------------------------------------------------------------

_LOAD_FAILED: Final = "NODE_LIBRARY_LOAD_FAILED_SYM"


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the file; ``takes_manager`` tells whether it wants the manager as its last argument."""

    name: str
    call: Callable[..., Any]
    takes_manager: bool

    def arguments(self, manager: Any, *others: Any) -> tuple[Any, ...]:
        """Give the arguments to call it with."""
        return (*others, manager) if self.takes_manager else others


@dataclass(frozen=True, slots=True)
class Functions:
    """All functions of the file; None where one that may be left out is."""

    execute: UserFunction
    get_inputs_info: UserFunction
    get_outputs_info: UserFunction
    initialize: UserFunction | None
    deinitialize: UserFunction | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a function is called with; ``optional_manager`` if it may leave the manager out."""

    arguments: tuple[str, ...]
    optional_manager: bool = True
    is_required: bool = True

    def signature(self, name: str) -> str:
        """Show how to write it."""
        shown = ", ".join(self.arguments) + ("[, manager]" if self.optional_manager else "")
        return f"def {name}({shown})"


_WANTED: Final = {
    "execute": _Wanted(("inputs", "params")),
    "get_inputs_info": _Wanted(("params",)),
    "get_outputs_info": _Wanted(("params",)),
    "initialize": _Wanted(("params",), optional_manager=False, is_required=False),
    "deinitialize": _Wanted(("manager",), optional_manager=False, is_required=False),
}


def find_functions(module: ModuleType, file: UserFile) -> Functions:
    """Find the functions of a file.

    Raises:
        ConfigError: some are missing, or take other arguments; all are listed.
    """
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, wanted in _WANTED.items():
        function = getattr(module, name, None)
        found[name] = None
        if function is None:
            if wanted.is_required:
                fix = f"write {wanted.signature(name)}"
                problems.append(file.problem(_LOAD_FAILED, f"{name} is missing", suggestion=fix))
            continue
        made = _made(name, function, wanted)
        if made is None:
            line = file.line_of(place_of(function) if callable(function) else None)
            text = f"{name} is no function of the right arguments"
            problems.append(file.problem(_LOAD_FAILED, text, line=line, suggestion=f"write {wanted.signature(name)}"))
        found[name] = made
    if problems:
        raise ConfigError(problems)
    return Functions(**found)


def _made(name: str, function: Any, wanted: _Wanted) -> UserFunction | None:
    if not callable(function):
        return None
    count = len(wanted.arguments)
    if wanted.optional_manager and _accepts(function, count + 1):
        return UserFunction(name, function, takes_manager=True)
    return UserFunction(name, function, takes_manager=False) if _accepts(function, count) else None


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # Functions of compiled modules may have no signature to look at.
        return True
    return True


# ----------------------------------------------------------------------
# What the functions of a file give: names, types and shapes of inputs and outputs, and the arrays of ``execute``
# ----------------------------------------------------------------------

_EXAMPLE: Final = 'return {"name": ("FP32", [1, -1])}'
_DYNAMIC: Final = -1
_METADATA_FAILED: Final = "NODE_LIBRARY_METADATA_FAILED"

DATATYPE_OF: Final[Mapping[np.dtype[Any], Datatype]] = {
    datatype.numpy: datatype for name, datatype in BY_NAME.items() if name not in ("BF16", "BYTES")
}
"""What arrays of a dtype hold."""


class _WrongInfoError(Exception):
    """One entry cannot be used."""


def read_infos(given: Any, function: UserFunction, file: UserFile) -> dict[str, ItemInfo]:
    """Read what a function gives: names, element types and shapes.

    An element type is a name (``FP32``, ``INT32``, or OVMS's ``I32``), a dtype of numpy's, or None if there is nothing
    to say.  A size of -1 or 0 means that any will do.

    Raises:
        ConfigError: an entry cannot be used; all are listed.
    """
    line = file.line_of(place_of(function.call))
    if not isinstance(given, Mapping) or not given:
        message = f"{function.name} must give a dict with at least one name, not {_shown(given)}"
        raise ConfigError([file.problem(_METADATA_FAILED, message, line=line, suggestion=_EXAMPLE)])
    infos: dict[str, ItemInfo] = {}
    problems = []
    for name, value in given.items():
        try:
            infos[name] = _info(name, value)
        except _WrongInfoError as wrong:
            message = f"{function.name}: {_shown(name)}: {wrong}"
            problems.append(file.problem(_METADATA_FAILED, message, line=line, suggestion=_EXAMPLE))
    if problems:
        raise ConfigError(problems)
    return infos


def _info(name: Any, value: Any) -> ItemInfo:
    if not isinstance(name, str) or not name:
        raise _WrongInfoError("a name must be a text that is not empty")
    if not isinstance(value, tuple | list) or len(value) != 2:  # noqa: PLR2004 - type and shape
        raise _WrongInfoError(f"an element type and a shape are expected, not {_shown(value)}")
    return ItemInfo(name, _datatype(value[0]), _shape(value[1]))


def _datatype(value: Any) -> Datatype | None:
    if value is None:
        return None
    found = None
    if isinstance(value, str):
        found = BY_NAME.get(value.upper()) or BY_OPENVINO_NAME.get(value.lower())
    if found is None:
        try:
            found = DATATYPE_OF.get(np.dtype(value).newbyteorder("<"))
        except TypeError:
            found = None
    if found is None or found is BYTES:
        raise _WrongInfoError(f"{_shown(value)} is no element type of tensors; texts travel as UINT8 of two dimensions")
    return found


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _WrongInfoError(f"a shape is a list of sizes, not {_shown(value)}")
    for size in value:
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < _DYNAMIC:
            raise _WrongInfoError(f"{_shown(size)} is no size; -1 or 0 stands for any")
    return tuple(int(size) or _DYNAMIC for size in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."  # noqa: PLR2004 - fits a line


class WrongOutputsError(Exception):
    """What ``execute`` gave cannot be used; ``code`` says how."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def read_outputs(given: Any) -> dict[str, Array]:
    """Check what ``execute`` gave, and give arrays that are C-contiguous and in this machine's byte order.

    Raises:
        WrongOutputsError: it is no dict of arrays with element types of tensors.
    """
    if not isinstance(given, Mapping) or not given:
        found = "an empty dict" if isinstance(given, Mapping) else type(given).__name__
        code = (
            "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT" if isinstance(given, Mapping) else "NODE_LIBRARY_OUTPUTS_CORRUPTED"
        )
        raise WrongOutputsError(code, f"execute must return a dict with an array for each output, not {found}")
    # The user may keep an array, or give it twice, so that nobody may take it for his own.
    return read_only({_name(name): _array(name, value) for name, value in given.items()})


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        text = f"execute returned an output without a name: the key is {name!r}"
        raise WrongOutputsError("NODE_LIBRARY_OUTPUT_MISSING_NAME", text)
    return name


def _array(name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray | np.generic):
        text = f"output {name!r} must be an array of numpy's, not {type(value).__name__}; make it with np.asarray"
        raise WrongOutputsError("NODE_LIBRARY_OUTPUTS_CORRUPTED", text)
    array = np.asarray(value)
    dtype = array.dtype.newbyteorder("<")
    if dtype not in DATATYPE_OF:
        text = f"output {name!r} has dtype {array.dtype}, which no tensor has; texts travel as uint8 of two dimensions"
        raise WrongOutputsError("NODE_LIBRARY_INVALID_PRECISION", text)
    return np.asarray(array, dtype, order="C")


# ----------------------------------------------------------------------
# A Python file as a custom node of one pipeline
# ----------------------------------------------------------------------

CLOSING_SECONDS: Final = 10.0
"""How long calls that were left, and then ``deinitialize``, may take at the end."""


class PythonNode:
    """A loaded file; see :class:`~ovmstrio.pipelines.custom_node.CustomNode`.

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
