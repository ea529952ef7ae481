"""The user's object of a Python node (``OvmsPythonModel``): import, initialization, hooks and results.

Uses only packages that any interpreter of a worker process has.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.graphs.graph_config import Port
from ovmstrio.graphs.python_nodes.api import HttpPayload, Tensor
from ovmstrio.isolation.handler_imports import HandlerPackage

INITIALIZATION_FAILED: Final = "The Python Node state initialization failed"
_CLASS: Final = "OvmsPythonModel"


class NodeDescription(NamedTuple):
    """Description of a node for its user code; plain data.

    Attributes:
        node: the node's name.
        file: the handler file.
        inputs: input stream names in file order.
        outputs: output stream names in file order.
        has_loopback: whether the node has the loopback that generators need.
        documents: name of the output that accepts documents (dict, str, bytes); empty if there is none.
    """

    node: str
    file: str
    inputs: list[str]
    outputs: list[str]
    has_loopback: bool
    documents: str = ""


class HookState:
    """State of the ``open`` and ``close`` hooks of one instance.

    ``close`` runs only if ``open`` has started, and ``open`` does not start after ``close``: the caller may leave while
    ``open`` waits for a thread.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> bool:
        """Record the start of ``open``; False if ``open`` must not run any more."""
        self._has_begun = not self._has_ended
        return self._has_begun

    def end(self) -> bool:
        """Record the end; True if ``close`` must run."""
        self._has_ended = True
        return self._has_begun

    def opening(self, hook: Callable[..., Any]) -> Callable[[Any], Any]:
        """Return a function that runs the hook ``open`` after :meth:`begin`; async if the hook is."""
        if inspect.iscoroutinefunction(hook):

            async def begin_async(context: Any) -> None:
                if self.begin():
                    await hook(context)

            return begin_async
        return lambda context: hook(context) if self.begin() else None


class NodeModel:
    """The user's object.

    Attributes:
        model: the object; None before :meth:`make` and after :meth:`unload`.
        is_initializing: whether ``initialize`` is running.
    """

    def __init__(self, outline: NodeDescription) -> None:
        self.model: Any = None
        self.is_initializing = False
        self.hooks: dict[str, Callable[..., Any]] = {}
        self._outline = outline
        self._package: HandlerPackage | None = None

    def make(self) -> None:
        """Import the file and create the object. Blocks."""
        file = Path(self._outline.file)
        self._package = HandlerPackage(file.parent)
        model_class = getattr(self._package.load(file), _CLASS, None)
        if model_class is None:
            fix = f"define class {_CLASS} with a method execute(self, inputs)"
            raise self._problem(f"No {_CLASS} class found in {file}", fix)
        if not callable(getattr(model_class, "execute", None)):
            raise self._problem(
                f"{_CLASS} class defined in {file} does not implement execute method.", "define execute(self, inputs)"
            )
        self.model = model_class()
        found = {name: self._hook(name) for name in ("open", "close")}
        self.hooks = {name: hook for name, hook in found.items() if hook is not None}

    def initialize(self) -> Any:
        """Run ``initialize``, if there is one; return an awaitable if it is async."""
        initialize = self.method("initialize")
        if initialize is None:
            return None
        result = None
        self.is_initializing = True
        try:
            result = initialize(self._arguments())
        finally:
            self.is_initializing = inspect.iscoroutine(result)
        return self._awaited(result) if inspect.iscoroutine(result) else None

    async def _awaited(self, result: Any) -> None:
        try:
            await result
        finally:
            self.is_initializing = False

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return a method of the object, or None."""
        method: Callable[..., Any] | None = getattr(self.model, name, None)
        return method

    def unload(self) -> None:
        """Release the object and its modules."""
        self.model = None
        if self._package is not None:
            self._package.unload()
            self._package = None

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """Return a hook: a method with exactly one positional argument; other methods of this name are not hooks."""
        method = self.method(name)
        try:
            parameters = [] if method is None else list(inspect.signature(method).parameters.values())
        except (TypeError, ValueError):
            return None
        by_position = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
        wanted = [each for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
        return method if len(by_position) == 1 and not wanted else None

    def _arguments(self) -> dict[str, Any]:
        outline = self._outline
        return {
            "node_name": outline.node,
            "input_names": list(outline.inputs),
            "output_names": list(outline.outputs),
            "outputs_names": list(outline.outputs),
            "base_path": str(Path(outline.file).parent),
        }

    def _problem(self, message: str, fix: str) -> ConfigError:
        outline = self._outline
        path = f"node {outline.node!r}"
        return ConfigError(
            [Problem(f"{INITIALIZATION_FAILED} - {message}", file=outline.file, path=path, suggestion=fix)]
        )


# Results of user code

_LOOPBACK_MISSING = "Execute yielded, but LOOPBACK is not defined in the node"

_Port = TypeVar("_Port")

Outputs = list[tuple[Port, Tensor]]
"""Tensors with their output ports."""


class InvalidOutputError(Exception):
    """A result of user code cannot be sent."""


def documents_to_tensors(value: Any, output: str) -> Any:
    """Convert documents in a result of user code to tensors; return other values unchanged.

    A ``dict`` becomes JSON, ``str`` text and ``bytes`` binary; the tensor's datatype is the content type. ``output`` is
    the output for documents, empty if the node has none.
    """
    if not output:
        return value
    if isinstance(value, _DOCUMENTS):
        return [_document(value, output)]
    if isinstance(value, list):
        return [_document(each, output) if isinstance(each, _DOCUMENTS) else each for each in value]
    return value


_DOCUMENTS = (dict, str, bytes)


def _document(value: dict[Any, Any] | str | bytes, output: str) -> Tensor:
    if isinstance(value, bytes):
        return Tensor(output, value, datatype="application/octet-stream")
    if isinstance(value, str):
        return Tensor(output, value.encode(errors="replace"), datatype="text/plain; charset=utf-8")
    try:
        return Tensor(output, json.dumps(value, allow_nan=False).encode(), datatype="application/json")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOutputError(f"a dict cannot be written as JSON: {error}") from None


def route_tensors(values: Iterable[Any], ports: Mapping[str, _Port], what: str) -> list[tuple[_Port, Tensor]]:
    """Return the port of each tensor; ``what`` begins error messages, such as ``execute returned a list``."""
    found: list[tuple[_Port, Tensor]] = []
    for number, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise InvalidOutputError(f"{what} whose element {number} is {_article(value)}; expected pyovms.Tensor")
        port = ports.get(value.name)
        if port is None:
            raise InvalidOutputError(
                f"Unexpected Tensor found in the outputs. Tensor name: {value.name} is not a valid node output; "
                f"expected one of: {', '.join(ports)}"
            )
        found.append((port, value))
    return found


def route_yielded_tensors(value: Any, ports: Mapping[str, _Port]) -> list[tuple[_Port, Tensor]]:
    """Return the ports of yielded tensors, which may be any iterable.

    Writable buffers are copied, because the generator may refill them before they are sent.
    """
    if isinstance(value, Tensor) or not isinstance(value, Iterable):
        raise InvalidOutputError(
            f"the generator of execute yielded {_article(value)}; expected a list of pyovms.Tensor"
        )
    found = route_tensors(value, ports, f"the generator of execute yielded {_article(value)}")
    return [(port, tensor._frozen()) for port, tensor in found]  # noqa: SLF001 - pyovms's interface for the server


def unexpected_result_error(value: Any) -> InvalidOutputError:
    """Return the error for an ``execute`` result of the wrong type, or a generator of a node without a loopback."""
    if inspect.isasyncgen(value) or hasattr(value, "__next__"):
        return InvalidOutputError(_LOOPBACK_MISSING)
    return InvalidOutputError(
        f"Unexpected Python object type. Expected: list or generator. Received: {type(value).__name__}"
    )


def _article(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


# Tensors in messages between processes


def tensor_to_row(tensor: Tensor) -> list[Any]:
    """Return name, shape, datatype and buffer (not copied) of a tensor, and the head of an HTTP request."""
    array = np.asarray(tensor)
    if array.dtype.names is not None:
        array = np.ascontiguousarray(array).view(f"V{array.dtype.itemsize}")
    head = [list(tensor._head)] if isinstance(tensor, HttpPayload) else []  # noqa: SLF001 - pyovms's server interface
    return [tensor.name, list(tensor.shape), tensor.datatype, array, *head]


def tensor_from_row(row: Iterable[Any]) -> Tensor:
    """Create a tensor over the buffer of a row."""
    name, shape, datatype, array, *heads = row
    if not (isinstance(name, str) and isinstance(datatype, str) and isinstance(array, np.ndarray)):
        raise TypeError("not a tensor")
    for head in heads:
        return HttpPayload._received(name, array, tuple(head))  # noqa: SLF001 - pyovms's server interface
    return Tensor._restored(name, array, tuple(map(int, shape)), datatype)  # noqa: SLF001 - pyovms's server interface
