"""Between numpy arrays, as the rest of the server has them, and OpenVINO's tensors.

There is one way in: ``set_input_tensor`` with a tensor that shares the array's memory.  Mixing it with OpenVINO's
copying ``infer(inputs)`` corrupts the heap in 2026.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import openvino as ov

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import BY_NAME, BY_OPENVINO_NAME, BYTES, Array, TensorSpec, to_bf16
from ovmstrio.inference.runtime import OPENVINO_ERRORS, reason
from ovmstrio.inference.signature import dims_of

__all__ = [
    "State",
    "StateChange",
    "from_tensor",
    "idle_tensor",
    "placeholder",
    "read_variables",
    "set_inputs",
    "to_tensor",
    "view_of",
]

# ----------------------------------------------------------------------
# Between numpy arrays, as the rest of the server has them, and OpenVINO's tensors
# ----------------------------------------------------------------------

_TYPES: Final = {row.name: getattr(ov.Type, row.openvino) for row in BY_NAME.values()}

# OpenVINO makes its tables of numpy's types when they are first needed, and lets go of Python's lock meanwhile: where
# two threads need them at once, each waits for ever for what the other holds.  Here nobody else can need them yet.
ov.Type.f32.to_dtype()
ov.Type(np.float32)


def to_tensor(array: Array, spec: TensorSpec) -> ov.Tensor:
    """Make a tensor that shares the array's memory, which may be read-only; whoever calls keeps the array alive.

    Strings are copied, and lose NULs at their ends: OpenVINO takes them in no other form from Python.
    """
    if spec.datatype is BYTES:
        tensor = ov.Tensor(ov.Type.string, ov.Shape(array.shape))
        if array.size:
            tensor.bytes_data = array.astype("S")
        return tensor
    # This constructor, unlike `Tensor(array, shared_memory=True)`, takes read-only arrays, such as views of bytes.
    return ov.Tensor(array, ov.Shape(array.shape), _TYPES[spec.datatype.name])


def from_tensor(tensor: ov.Tensor, spec: TensorSpec) -> Array:
    """Copy a tensor into an array of the dtype ``spec.datatype.numpy``."""
    if spec.datatype is BYTES:
        # OpenVINO looks for the longest string also where there is none, in memory that is not the tensor's.
        strings: Array = tensor.bytes_data.astype(object) if tensor.get_size() else np.empty(list(tensor.shape), object)
        return strings
    copy: Array = tensor.data.copy()
    return copy if copy.dtype == spec.datatype.numpy else copy.view(spec.datatype.numpy)


def view_of(tensor: ov.Tensor, spec: TensorSpec) -> Array:
    """Give a view of a tensor, of the dtype ``spec.datatype.numpy``, for as long as the tensor; of strings a copy."""
    if spec.datatype is BYTES:
        return from_tensor(tensor, spec)
    view: Array = tensor.data
    return view if view.dtype == spec.datatype.numpy else view.view(spec.datatype.numpy)


def _small_shape(spec: TensorSpec, more: int = 0) -> list[int]:
    least = [1 if dim.accepts(1) else dim.low for dim in spec.shape]
    return [size + more if dim.accepts(size + more) else size for size, dim in zip(least, spec.shape, strict=True)]


def placeholder(spec: TensorSpec, more: int = 0, *, value: int = 1) -> Array:
    """Make an input of ones, as small as can be; open dimensions are larger by ``more``.

    Zeros are not what models are made for: OpenVINO 2026.4 divides by a step of 0 in ``Range``, which ends the process.
    Strings are ``1``, or empty for a ``value`` of 0.
    """
    shape = _small_shape(spec, more)
    if spec.datatype is BYTES:
        return np.full(shape, str(value).encode() if value else b"", dtype=object)
    filled = np.full(shape, value, np.float32 if spec.datatype.name == "BF16" else spec.datatype.numpy)
    return to_bf16(filled) if spec.datatype.name == "BF16" else filled


def idle_tensor(spec: TensorSpec) -> ov.Tensor:
    """Make a tensor, of OpenVINO's own memory, for a request that is not in use to hold."""
    return ov.Tensor(_TYPES[spec.datatype.name], ov.Shape(_small_shape(spec)))


def set_inputs(request: ov.InferRequest, ports: Sequence[int], tensors: Sequence[ov.Tensor]) -> None:
    """Give a request its inputs; what it had before is let go."""
    for port, tensor in zip(ports, tensors, strict=True):
        request.set_input_tensor(port, tensor)


# ----------------------------------------------------------------------
# What a model remembers from one inference to the next: the values of its variables, moved in and out of requests
# ----------------------------------------------------------------------

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
