"""A Python node in a worker process: the user's object and its open instances."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ovmstrio.graphs.python_nodes.api import Context
from ovmstrio.graphs.python_nodes.api.context import CURRENT
from ovmstrio.graphs.python_nodes.node_model import (
    HookState,
    NodeDescription,
    NodeModel,
    documents_to_tensors,
    route_tensors,
    route_yielded_tensors,
    tensor_from_row,
    tensor_to_row,
    unexpected_result_error,
)
from ovmstrio.isolation.code_host import HostedObject, Invocation


class _Instance:
    __slots__ = ("context", "is_stopped", "pair", "variables")

    def __init__(self, arguments: list[Any]) -> None:
        parameters, request_id, seconds = arguments
        self.is_stopped = False
        self.pair = HookState()
        left = math.inf if seconds is None else seconds
        self.context = Context(parameters, request_id, left, lambda: self.is_stopped)
        self.variables = contextvars.copy_context()
        self.variables.run(CURRENT.set, self.context)

    def stop(self) -> None:
        self.is_stopped = True


class _HostedNode:
    """Implementation of :class:`HostedObject`; instances without state are dropped after each call."""

    def __init__(self, outline: NodeDescription) -> None:
        self._node_model = NodeModel(outline)
        self._names = {name: name for name in outline.outputs}
        self._has_loopback = outline.has_loopback
        self._documents = outline.documents
        self._instances: dict[int, _Instance] = {}

    def invoke(self, method: str, value: Any) -> Invocation:
        match method:
            case "make":
                return Invocation(self._node_model.make, convert=self._describe)
            case "initialize":
                return Invocation(self._node_model.initialize)
            case "finalize":
                return Invocation(self._finalize())
            case "execute":
                return self._execute(*value)
        return self._run_hook(method, *value)

    def _describe(self, _: Any) -> dict[str, Any]:
        methods = {name: self._node_model.method(name) for name in ("execute", *self._node_model.hooks)}
        codes = {name: getattr(method, "__code__", None) for name, method in methods.items()}
        places = {name: [code.co_filename, code.co_firstlineno] for name, code in codes.items() if code is not None}
        return {"hooks": list(self._node_model.hooks), "places": places}

    def _finalize(self) -> Callable[[], Any]:
        finalize = self._node_model.method("finalize")
        if finalize is None:
            return lambda: None
        if self._node_model.is_initializing:
            raise RuntimeError("initialize has not ended")
        return finalize

    def _execute(self, number: int, arguments: list[Any], inputs: list[Any]) -> Invocation:
        instance = self._instance(number, arguments)
        tensors = [tensor_from_row(row) for row in inputs]
        return Invocation(
            self._node_model.model.execute,
            (tensors,),
            instance.variables,
            convert=partial(self._outputs, number, instance),
            convert_item=self._yielded if self._has_loopback else None,
            stop=instance.stop,
        )

    def _run_hook(self, method: str, number: int, arguments: list[Any]) -> Invocation:
        instance = self._instance(number, arguments)
        hook: Callable[..., Any] = self._node_model.hooks[method]
        if method == "open":
            hook = instance.pair.opening(hook)
        elif "open" in self._node_model.hooks and not instance.pair.end():
            return Invocation(lambda: None)
        return Invocation(hook, (instance.context,), instance.variables, convert=lambda _: None, stop=instance.stop)

    def _instance(self, number: int, arguments: list[Any]) -> _Instance:
        known = self._instances.get(number)
        if known is None:
            known = self._instances[number] = _Instance(arguments)
        return known

    def _outputs(self, number: int, instance: _Instance, result: Any) -> list[Any]:
        """Return the rows of a list result, and whether the instance is kept."""
        is_kept = bool(instance.context.storage or self._node_model.hooks)
        if not is_kept:
            self._instances.pop(number, None)
        result = [] if result is None else documents_to_tensors(result, self._documents)
        if not isinstance(result, list):
            raise unexpected_result_error(result)
        return [
            is_kept,
            [tensor_to_row(each) for _, each in route_tensors(result, self._names, "execute returned a list")],
        ]

    def _yielded(self, value: Any) -> list[Any]:
        return [
            tensor_to_row(tensor)
            for _, tensor in route_yielded_tensors(documents_to_tensors(value, self._documents), self._names)
        ]

    def forget(self, value: Any) -> None:
        self._instances.pop(value, None)


def host_node(argument: Any) -> HostedObject:
    """Create the hosted node of an outline."""
    return _HostedNode(NodeDescription(*argument))
