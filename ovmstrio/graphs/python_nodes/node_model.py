"""The user's object behind a Python node, in whichever thread or process: made of its file, and initialized.

Needs nothing that is installed, so that it can be used under any interpreter.
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
from ovmstrio.isolation.importing import HandlerPackage
from pyovms import HttpPayload, Tensor

__all__ = [
    "FAILED",
    "NO_LOOPBACK",
    "HookPair",
    "NodeModel",
    "NodeOutline",
    "Outputs",
    "WrongOutputError",
    "as_tensors",
    "routed",
    "routed_yield",
    "tensor_of",
    "tensor_row",
    "unexpected_result",
]

# ----------------------------------------------------------------------
# The user's object behind a Python node, in whichever thread or process: made of its file, and initialized
# ----------------------------------------------------------------------

FAILED: Final = "The Python Node state initialization failed"
_CLASS: Final = "OvmsPythonModel"


class NodeOutline(NamedTuple):
    """What an object is told of its node, and where it comes from; plain data.

    Attributes:
        node: the node's name.
        file: the handler's.
        inputs: the names of the streams, in the order of the graph's file.
        outputs: the same.
        has_loopback: whether there is a cycle, as generators need it.
        documents: the name of the output that takes documents as they are; empty if there is none.
    """

    node: str
    file: str
    inputs: list[str]
    outputs: list[str]
    has_loopback: bool
    documents: str = ""


class HookPair:
    """Sees that ``close`` of one call or stream runs if ``open`` has begun, and that this does not begin later.

    A caller may leave while the hook waits for a thread.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> bool:
        """Note that ``open`` runs, or would if there were one; False if it must not any more."""
        self._has_begun = not self._has_ended
        return self._has_begun

    def end(self) -> bool:
        """Note that ``close`` is due, and tell whether it is to run."""
        self._has_ended = True
        return self._has_begun

    def opening(self, hook: Callable[..., Any]) -> Callable[[Any], Any]:
        """Give what runs a hook ``open``, on the event loop if that is where it runs."""
        if inspect.iscoroutinefunction(hook):

            async def begin_async(context: Any) -> None:
                if self.begin():
                    await hook(context)

            return begin_async
        return lambda context: hook(context) if self.begin() else None


class NodeModel:
    """One object, from the import of its file on.

    Args:
        outline: what it is made of.

    Attributes:
        model: the user's object, None before it is made and after the end.
        is_initializing: whether ``initialize`` runs.
    """

    def __init__(self, outline: NodeOutline) -> None:
        self.model: Any = None
        self.is_initializing = False
        self.hooks: dict[str, Callable[..., Any]] = {}
        self._outline = outline
        self._package: HandlerPackage | None = None

    def make(self) -> None:
        """Import the file and make the object; blocking.

        Raises:
            ConfigError: it has no class, or one without ``execute``.
            BaseException: what the user's code raises.
        """
        file = Path(self._outline.file)
        self._package = HandlerPackage(file.parent)
        made = getattr(self._package.load(file), _CLASS, None)
        if made is None:
            fix = f"define class {_CLASS} with a method execute(self, inputs)"
            raise self._problem(f"No {_CLASS} class found in {file}", fix)
        if not callable(getattr(made, "execute", None)):
            raise self._problem(
                f"{_CLASS} class defined in {file} does not implement execute method.", "define execute(self, inputs)"
            )
        self.model = made()
        found = {name: self._hook(name) for name in ("open", "close")}
        self.hooks = {name: hook for name, hook in found.items() if hook is not None}

    def initialize(self) -> Any:
        """Run ``initialize``, where the object has one; give what is to be awaited, if that is how it is written.

        Raises:
            BaseException: what it raises.
        """
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
        """Give a method of the object, None where it has none."""
        method: Callable[..., Any] | None = getattr(self.model, name, None)
        return method

    def unload(self) -> None:
        """Forget the object and its modules."""
        self.model = None
        if self._package is not None:
            self._package.unload()
            self._package = None

    def _hook(self, name: str) -> Callable[..., Any] | None:
        """Give a method that takes one argument by position, the context, whatever it calls that.

        One that takes none or several is the user's own affair.
        """
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
        return ConfigError([Problem(f"{FAILED} - {message}", file=outline.file, path=path, suggestion=fix)])


# ----------------------------------------------------------------------
# What user code may give back, and where each tensor of it goes
# ----------------------------------------------------------------------

NO_LOOPBACK = "Execute yielded, but LOOPBACK is not defined in the node"

_Port = TypeVar("_Port")

Outputs = list[tuple[Port, Tensor]]
"""Tensors, and the ports through which they leave."""


class WrongOutputError(Exception):
    """User code gave back something that a Python node cannot send; the text says what was expected and found."""


def as_tensors(value: Any, output: str) -> Any:
    """Make tensors of documents among what user code gave back; what is no document is given as it is.

    A ``dict`` is JSON, a ``str`` is text and ``bytes`` are bytes; the datatype of such a tensor is its type of content.
    ``output`` is the name of the output that takes documents, empty if the node has none.

    Raises:
        WrongOutputError: JSON cannot say it.
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
        raise WrongOutputError(f"a dict cannot be written as JSON: {error}") from None


def routed(values: Iterable[Any], ports: Mapping[str, _Port], what: str) -> list[tuple[_Port, Tensor]]:
    """Find the port of each tensor; ``what`` begins the text of errors, such as ``execute returned a list``.

    Raises:
        WrongOutputError: a value is no tensor, or bears the name of no output.
    """
    found: list[tuple[_Port, Tensor]] = []
    for number, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise WrongOutputError(f"{what} whose element {number} is {_article(value)}; expected pyovms.Tensor")
        port = ports.get(value.name)
        if port is None:
            raise WrongOutputError(
                f"Unexpected Tensor found in the outputs. Tensor name: {value.name} is not a valid node output; "
                f"expected one of: {', '.join(ports)}"
            )
        found.append((port, value))
    return found


def routed_yield(value: Any, ports: Mapping[str, _Port]) -> list[tuple[_Port, Tensor]]:
    """Find the ports of what a generator yielded, which may be any iterable of tensors.

    The generator runs on before they are sent, and may fill the same array again; so what it could change is copied.

    Raises:
        WrongOutputError: it is none.
        Exception: what iterating over it raises.
    """
    if isinstance(value, Tensor) or not isinstance(value, Iterable):
        raise WrongOutputError(f"the generator of execute yielded {_article(value)}; expected a list of pyovms.Tensor")
    found = routed(value, ports, f"the generator of execute yielded {_article(value)}")
    return [(port, tensor._frozen()) for port, tensor in found]  # noqa: SLF001 - pyovms's own for the server


def unexpected_result(value: Any) -> WrongOutputError:
    """Make the error for a result of execute that is no list, of a node without a loopback."""
    if inspect.isasyncgen(value) or hasattr(value, "__next__"):
        return WrongOutputError(NO_LOOPBACK)
    return WrongOutputError(
        f"Unexpected Python object type. Expected: list or generator. Received: {type(value).__name__}"
    )


def _article(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


# ----------------------------------------------------------------------
# Tensors of pyovms as what goes between processes, and back
# ----------------------------------------------------------------------


def tensor_row(tensor: Tensor) -> list[Any]:
    """Give a tensor's name, shape, datatype and buffer, which is not copied; of a request its head, too."""
    array = np.asarray(tensor)
    if array.dtype.names is not None:
        array = np.ascontiguousarray(array).view(f"V{array.dtype.itemsize}")
    head = [list(tensor._head)] if isinstance(tensor, HttpPayload) else []  # noqa: SLF001 - pyovms's own for the server
    return [tensor.name, list(tensor.shape), tensor.datatype, array, *head]


def tensor_of(row: Iterable[Any]) -> Tensor:
    """Make a tensor over the buffer of a row.

    Raises:
        ValueError, TypeError: it is none.
    """
    name, shape, datatype, array, *heads = row
    if not (isinstance(name, str) and isinstance(datatype, str) and isinstance(array, np.ndarray)):
        raise TypeError("no tensor")
    for head in heads:
        return HttpPayload._received(name, array, tuple(head))  # noqa: SLF001 - pyovms's own for the server
    return Tensor._restored(name, array, tuple(map(int, shape)), datatype)  # noqa: SLF001 - pyovms's own for the server
