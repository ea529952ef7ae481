"""What user code may give back, and where each tensor of it goes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ovmstrio.runtimes.graphs.config.graph_config import Port
from pyovms import Tensor

__all__ = ["NO_LOOPBACK", "Outputs", "WrongOutputError", "as_tensors", "routed", "routed_yield", "unexpected_result"]

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
