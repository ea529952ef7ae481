"""Custom nodes in Python files, with the functions of OVMS's C interface.

::

    def initialize(params): ...                   optional; returns the manager
    def get_inputs_info(params[, manager]): ...   {name: (datatype, shape)}
    def get_outputs_info(params[, manager]): ...  {name: (datatype, shape)}
    def execute(inputs, params[, manager]): ...   {name: array} of inputs to {name: array} of outputs
    def deinitialize(manager): ...                optional

Each may be ``async def``. Synchronous functions run in worker threads, and calls may overlap.
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

from ovmstrio.core.errors import ConfigError, CustomNodeFailure, Problem, ServerError, error_type
from ovmstrio.core.tensor import BY_NAME, BY_OPENVINO_NAME, BYTES, Array, Datatype
from ovmstrio.isolation.handler_imports import HandlerPackage
from ovmstrio.isolation.user_code import (
    SourceLine,
    UserCodeRaisedError,
    append_location,
    call_user_code,
    definition_location,
    describe_error,
    error_location,
    trim_traceback,
)
from ovmstrio.pipelines.custom_node import ItemInfo, create_node_threads, read_only_views
from ovmstrio.pipelines.native.library import NodeIdentity
from ovmstrio.util.truncation import shown

# Errors

log = structlog.get_logger(__name__)

_EXECUTION: Final = "NODE_LIBRARY_EXECUTION_FAILED"
_MAX_SHOWN_CHARACTERS: Final = 80


class _UserFile(NodeIdentity):
    """Python file of one node, for messages; with ``hide_errors`` clients see only the type of exceptions."""

    def __init__(self, node: str, path: Path, *, hide_errors: bool = False) -> None:
        super().__init__(node, path)
        self._hide_errors = hide_errors

    def report(self, error: BaseException, step: str) -> None:
        exc_info = (type(error), error, trim_traceback(error))
        log.error("custom node raised", node=self.name, file=str(self.path), step=step, exc_info=exc_info)

    def execution_error(self, error: BaseException, function: Callable[..., Any]) -> ServerError:
        self.report(error, "execute")
        if isinstance(error, ServerError):
            return error
        detail = type(error).__name__
        if not self._hide_errors:
            place = error_location(self.path.parent, error) or definition_location(function)
            detail = append_location(describe_error(error), place)
        failure = self.failed(_EXECUTION, detail)
        failure.user_type = error_type(error)
        return failure

    def output_error(self, code: str, detail: str, function: Callable[..., Any]) -> CustomNodeFailure:
        failure = self.failed(code, append_location(detail, definition_location(function)))
        log.error("custom node outputs invalid", node=self.name, file=str(self.path), reason=str(failure))
        return failure

    def loading_error(self, error: BaseException, code: str, step: str) -> ServerError:
        self.report(error, step)
        if isinstance(error, ConfigError):
            return error
        place = error_location(self.path.parent, error)
        line = self.line_of(place)
        detail = append_location(describe_error(error), place if line is None else None)
        return ConfigError([self.problem(code, f"{step} raised {detail}", line=line)])

    def line_of(self, place: SourceLine | None) -> int | None:
        return place.line if place is not None and place.file == str(self.path) else None


# Functions of a node file

_LOAD_FAILED: Final = "NODE_LIBRARY_LOAD_FAILED_SYM"


@dataclass(frozen=True, slots=True)
class _UserFunction:
    """A function of the file; ``takes_manager``: its last parameter is the manager."""

    name: str
    call: Callable[..., Any]
    takes_manager: bool

    def arguments(self, manager: Any, *others: Any) -> tuple[Any, ...]:
        return (*others, manager) if self.takes_manager else others


@dataclass(frozen=True, slots=True)
class _NodeFunctions:
    """Functions of a node file; None for missing optional functions."""

    execute: _UserFunction
    get_inputs_info: _UserFunction
    get_outputs_info: _UserFunction
    initialize: _UserFunction | None
    deinitialize: _UserFunction | None


@dataclass(frozen=True, slots=True)
class _FunctionSpec:
    """Parameters of a function; with ``optional_manager`` a final parameter ``manager`` is allowed."""

    arguments: tuple[str, ...]
    optional_manager: bool = True
    is_required: bool = True

    def signature(self, name: str) -> str:
        shown = ", ".join(self.arguments) + ("[, manager]" if self.optional_manager else "")
        return f"def {name}({shown})"


_FUNCTION_SPECS: Final = {
    "execute": _FunctionSpec(("inputs", "params")),
    "get_inputs_info": _FunctionSpec(("params",)),
    "get_outputs_info": _FunctionSpec(("params",)),
    "initialize": _FunctionSpec(("params",), optional_manager=False, is_required=False),
    "deinitialize": _FunctionSpec(("manager",), optional_manager=False, is_required=False),
}


def _find_functions(module: ModuleType, file: _UserFile) -> _NodeFunctions:
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, wanted in _FUNCTION_SPECS.items():
        function = getattr(module, name, None)
        found[name] = None
        if function is None:
            if wanted.is_required:
                fix = f"write {wanted.signature(name)}"
                problems.append(file.problem(_LOAD_FAILED, f"{name} is missing", suggestion=fix))
            continue
        bound = _bind_function(name, function, wanted)
        if bound is None:
            line = file.line_of(definition_location(function) if callable(function) else None)
            text = f"{name} is not a function with the right parameters"
            problems.append(file.problem(_LOAD_FAILED, text, line=line, suggestion=f"write {wanted.signature(name)}"))
        found[name] = bound
    if problems:
        raise ConfigError(problems)
    return _NodeFunctions(**found)


def _bind_function(name: str, function: Any, wanted: _FunctionSpec) -> _UserFunction | None:
    if not callable(function):
        return None
    count = len(wanted.arguments)
    if wanted.optional_manager and _accepts(function, count + 1):
        return _UserFunction(name, function, takes_manager=True)
    return _UserFunction(name, function, takes_manager=False) if _accepts(function, count) else None


def _accepts(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:
        # Functions of compiled modules may have no signature.
        return True
    return True


# Results of node functions

_EXAMPLE: Final = 'return {"name": ("FP32", [1, -1])}'
_DYNAMIC: Final = -1
_METADATA_FAILED: Final = "NODE_LIBRARY_METADATA_FAILED"

_DATATYPE_BY_DTYPE: Final[Mapping[np.dtype[Any], Datatype]] = {
    datatype.numpy: datatype for name, datatype in BY_NAME.items() if name not in ("BF16", "BYTES")
}
"""Datatypes by numpy dtype."""


class _WrongInfoError(Exception):
    pass


def _parse_item_infos(given: Any, function: _UserFunction, file: _UserFile) -> dict[str, ItemInfo]:
    """Return the described inputs or outputs.

    A datatype is a name (``FP32``, ``INT32``, or OVMS's ``I32``), a numpy dtype, or None if unknown. A size of -1 or 0
    means any size.
    """
    line = file.line_of(definition_location(function.call))
    if not isinstance(given, Mapping) or not given:
        message = f"{function.name} must return a non-empty dict, not {shown(given, _MAX_SHOWN_CHARACTERS)}"
        raise ConfigError([file.problem(_METADATA_FAILED, message, line=line, suggestion=_EXAMPLE)])
    infos: dict[str, ItemInfo] = {}
    problems = []
    for name, value in given.items():
        try:
            infos[name] = _info(name, value)
        except _WrongInfoError as wrong:
            message = f"{function.name}: {shown(name, _MAX_SHOWN_CHARACTERS)}: {wrong}"
            problems.append(file.problem(_METADATA_FAILED, message, line=line, suggestion=_EXAMPLE))
    if problems:
        raise ConfigError(problems)
    return infos


def _info(name: Any, value: Any) -> ItemInfo:
    if not isinstance(name, str) or not name:
        raise _WrongInfoError("a name must be a non-empty string")
    if not isinstance(value, tuple | list) or len(value) != 2:  # noqa: PLR2004 - type and shape
        raise _WrongInfoError(f"expected a datatype and a shape, not {shown(value, _MAX_SHOWN_CHARACTERS)}")
    return ItemInfo(name, _datatype(value[0]), _shape(value[1]))


def _datatype(value: Any) -> Datatype | None:
    if value is None:
        return None
    found = None
    if isinstance(value, str):
        found = BY_NAME.get(value.upper()) or BY_OPENVINO_NAME.get(value.lower())
    if found is None:
        try:
            found = _DATATYPE_BY_DTYPE.get(np.dtype(value).newbyteorder("<"))
        except TypeError:
            found = None
    if found is None or found is BYTES:
        raise _WrongInfoError(
            f"{shown(value, _MAX_SHOWN_CHARACTERS)} is not a datatype; use UINT8 with two dimensions for strings"
        )
    return found


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _WrongInfoError(f"a shape must be a list of sizes, not {shown(value, _MAX_SHOWN_CHARACTERS)}")
    for size in value:
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < _DYNAMIC:
            raise _WrongInfoError(f"{shown(size, _MAX_SHOWN_CHARACTERS)} is not a size; use -1 or 0 for any size")
    return tuple(int(size) or _DYNAMIC for size in value)


class _InvalidOutputsError(Exception):
    """The result of ``execute`` is invalid; ``code`` is the OVMS error code."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def _check_outputs(given: Any) -> dict[str, Array]:
    """Check the result of ``execute`` and return C-contiguous arrays in native byte order."""
    if not isinstance(given, Mapping) or not given:
        found = "an empty dict" if isinstance(given, Mapping) else type(given).__name__
        code = (
            "NODE_LIBRARY_OUTPUTS_CORRUPTED_COUNT" if isinstance(given, Mapping) else "NODE_LIBRARY_OUTPUTS_CORRUPTED"
        )
        raise _InvalidOutputsError(code, f"execute must return a dict with an array for each output, not {found}")
    # User code may keep an array or return it twice, so nodes must not write to it.
    return read_only_views({_name(name): _array(name, value) for name, value in given.items()})


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        text = f"execute returned an output without a name: the key is {name!r}"
        raise _InvalidOutputsError("NODE_LIBRARY_OUTPUT_MISSING_NAME", text)
    return name


def _array(name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray | np.generic):
        text = f"output {name!r} must be a numpy array, not {type(value).__name__}; convert it with np.asarray"
        raise _InvalidOutputsError("NODE_LIBRARY_OUTPUTS_CORRUPTED", text)
    array = np.asarray(value)
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _DATATYPE_BY_DTYPE:
        text = f"output {name!r} has unsupported dtype {array.dtype}; use uint8 with two dimensions for strings"
        raise _InvalidOutputsError("NODE_LIBRARY_INVALID_PRECISION", text)
    return np.asarray(array, dtype, order="C")


# Node

_CLOSING_SECONDS: Final = 10.0
"""Time limit for abandoned calls and ``deinitialize`` at closing."""


class PythonNode:
    """A loaded Python file; see :class:`~ovmstrio.pipelines.custom_node.CustomNode`.

    Each node imports its own copy of the file, so nodes share nothing.
    """

    def __init__(self, file: _UserFile, params: Mapping[str, str]) -> None:
        self.inputs: Mapping[str, ItemInfo] = {}
        self.outputs: Mapping[str, ItemInfo] = {}
        self._file = file
        self._params = MappingProxyType(dict(params))
        self._threads = create_node_threads(file.name, f"custom node {file.name!r}")
        self._package = HandlerPackage(file.path.parent)
        self._functions: _NodeFunctions | None = None
        self._manager: Any = None
        self._is_initialized = False

    # Life

    async def load(self, tasks: trio.Nursery) -> None:
        """Import the file, initialize it and read its inputs and outputs, in threads run by ``tasks``."""
        await tasks.start(self._threads.run)
        module = await self._load_by("NODE_LIBRARY_LOAD_FAILED_OPEN", "the file", self._package.load, self._file.path)
        self._functions = functions = _find_functions(module, self._file)
        if functions.initialize is not None:
            initialize = functions.initialize.call
            code = "NODE_LIBRARY_INITIALIZE_FAILED"
            self._manager = await self._load_by(code, "initialize", initialize, self._params)
        self._is_initialized = True
        self.inputs = await self._read_info(functions.get_inputs_info)
        self.outputs = await self._read_info(functions.get_outputs_info)

    async def _load_by(self, code: str, step: str, function: Any, *args: Any) -> Any:
        try:
            return await self._run(function, *args)
        except UserCodeRaisedError as raised:
            raise self._file.loading_error(raised.error, code, step) from None

    async def _read_info(self, function: _UserFunction) -> dict[str, ItemInfo]:
        args = function.arguments(self._manager, self._params)
        given = await self._load_by("NODE_LIBRARY_METADATA_FAILED", function.name, function.call, *args)
        return _parse_item_infos(given, function, self._file)

    async def aclose(self) -> None:
        """Deinitialize the node once no call is in progress; log errors. Shielded for ``CLOSING_SECONDS``."""
        functions = self._functions
        if functions is not None and functions.deinitialize is not None and self._is_initialized:
            self._is_initialized = False
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSING_SECONDS) as scope:
                await self._deinitialize(functions.deinitialize)
            if scope.cancelled_caught:
                log.error("custom node deinitialization timed out", node=self._file.name)
        self._threads.close()
        self._package.unload()

    async def _deinitialize(self, function: _UserFunction) -> None:
        await self._threads.idle()
        try:
            await self._run(function.call, self._manager)
        except UserCodeRaisedError as raised:
            self._file.report(raised.error, "deinitialize")

    # Calls

    async def execute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the node once, in a worker thread unless ``execute`` is ``async def``."""
        if self._functions is None:
            raise RuntimeError(f"custom node {self._file.name!r} is not loaded")
        function = self._functions.execute
        try:
            given = await self._run(
                function.call, *function.arguments(self._manager, read_only_views(inputs), self._params)
            )
            return _check_outputs(given)
        except UserCodeRaisedError as raised:
            raise self._file.execution_error(raised.error, function.call) from None
        except _InvalidOutputsError as wrong:
            raise self._file.output_error(wrong.code, str(wrong), function.call) from None

    async def _run(self, function: Any, *args: Any) -> Any:
        return await call_user_code(self._threads, function, args, is_abandonable=True)


async def open_python_node(
    path: Path, name: str, params: Mapping[str, str], *, tasks: trio.Nursery, hide_errors: bool = False
) -> PythonNode:
    """Load a Python file as a custom node; the caller owns the node and closes it."""
    file = _UserFile(name, path, hide_errors=hide_errors)
    node = PythonNode(file, params)
    try:
        await node.load(tasks)
    except BaseException:
        with trio.CancelScope(shield=True):
            await node.aclose()
        raise
    return node
