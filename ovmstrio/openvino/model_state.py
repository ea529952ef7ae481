"""What a model remembers from one inference to the next: the values of its variables, moved in and out of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import openvino as ov

from ovmstrio.core.datatypes import BY_OPENVINO_NAME, BYTES
from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.openvino.ov_tensors import from_tensor, idle_tensor, to_tensor, view_of
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import dims_of

__all__ = ["State", "StateChange", "read_variables"]

State = Mapping[str, Array]
"""The value of each variable, by name; never changed once it is made."""

_KEPT_BYTES: Final = 16 * 1024
"""Values up to which are given to OpenVINO by way of memory of a request's own: a copy costs less than a new tensor."""


def read_variables(model: ov.Model, file: str) -> tuple[TensorSpec, ...]:
    """Describe the variables of a model, in the order of their names.

    Raises:
        ConfigError: one has an element type that cannot be kept.
    """
    variables = [_variable(variable.info, file) for variable in model.get_variables()]
    return tuple(sorted(variables, key=lambda variable: variable.name))


def _variable(info: Any, file: str) -> TensorSpec:
    datatype = BY_OPENVINO_NAME.get(info.data_type.get_type_name())
    if datatype is None or datatype is BYTES:
        message = f"the variable {info.variable_id!r} has the element type {info.data_type}, which cannot be kept"
        raise ConfigError([Problem(message, file=file, path="stateful")])
    return TensorSpec(info.variable_id, datatype, dims_of(info.data_shape), None)


class _Variable(NamedTuple):
    """One variable of one infer request.

    ``own`` is a tensor for values on their way into it, and ``view`` its memory; None where values may have other
    shapes, or are large.
    """

    spec: TensorSpec
    handle: Any
    own: ov.Tensor | None
    view: Array | None

    def set(self, value: Array) -> None:
        """Have it begin with ``value``, which OpenVINO copies."""
        view = self.view
        if view is None or value.shape != view.shape or value.dtype != view.dtype:
            self.handle.state = to_tensor(value, self.spec)
        else:
            view[...] = value
            self.handle.state = self.own


_known: Final[WeakKeyDictionary[ov.InferRequest, Sequence[_Variable]]] = WeakKeyDictionary()
"""The variables of requests: they stay the same, but OpenVINO makes new handles of them each time that it is asked."""


def _variables_of(request: ov.InferRequest, specs: Mapping[str, TensorSpec]) -> Sequence[_Variable]:
    found = _known.get(request)
    if found is None:
        found = _known[request] = [_look_up(handle, specs[handle.name]) for handle in request.query_state()]
    return found


def _look_up(handle: Any, spec: TensorSpec) -> _Variable:
    if not all(dim.is_fixed for dim in spec.shape):
        return _Variable(spec, handle, None, None)
    own = idle_tensor(spec)
    if own.byte_size > _KEPT_BYTES:
        return _Variable(spec, handle, None, None)
    return _Variable(spec, handle, own, view_of(own, spec))


class StateChange:
    """One inference's way from one state to the next, through whichever infer request it gets.

    Args:
        variables: the variables of the model, by name.
        before: the state that the inference begins with; None for the initial one.
        keep: whether the state that it ends with is wanted.
    """

    __slots__ = ("_before", "_entered", "_keep", "_variables", "after")

    def __init__(self, variables: Mapping[str, TensorSpec], before: State | None, *, keep: bool) -> None:
        self._variables = variables
        self._before = before
        self._keep = keep
        self._entered: Sequence[_Variable] = ()
        self.after: State = {}

    def enter(self, request: ov.InferRequest) -> None:
        """Give a request the state to begin with.

        Raises:
            ModelFailure: OpenVINO refuses it.
        """
        if not self._variables:
            return
        try:
            if self._before is None:
                request.reset_state()
                return
            self._entered = _variables_of(request, self._variables)
            for variable in self._entered:
                variable.set(self._before[variable.spec.name])
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"OpenVINO refuses the state of the sequence: {reason(error)}") from error

    def leave(self, request: ov.InferRequest) -> None:
        """Copy what the request remembers now into ``after``.

        Raises:
            ModelFailure: OpenVINO does not give it.
        """
        if not self._variables or not self._keep:
            return
        try:
            self.after = {
                variable.spec.name: from_tensor(variable.handle.state, variable.spec)
                for variable in self._entered or _variables_of(request, self._variables)
            }
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"OpenVINO does not give the state of the sequence: {reason(error)}") from error
