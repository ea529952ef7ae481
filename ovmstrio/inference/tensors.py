"""Conversion between numpy arrays and OpenVINO tensors, and the state of stateful models.

Inputs are always set with ``set_input_tensor`` on shared memory. Mixing this with OpenVINO's copying ``infer(inputs)``
corrupts the heap in 2026.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import openvino as ov

from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import BY_NAME, BY_OPENVINO_NAME, BYTES, Array, TensorSpec, to_bf16
from ovmstrio.inference.runtime import OPENVINO_ERRORS, openvino_error_message
from ovmstrio.inference.signature import dims_of

_TYPES: Final = {row.name: getattr(ov.Type, row.openvino) for row in BY_NAME.values()}

# OpenVINO builds its numpy type tables at first use and releases the GIL meanwhile: two threads at once would deadlock.
# At import no other thread can use them yet.
ov.Type.f32.to_dtype()
ov.Type(np.float32)


def to_tensor(array: Array, spec: TensorSpec) -> ov.Tensor:
    """Return a tensor that shares the array's memory, which may be read-only; the caller keeps the array alive.

    Strings are copied and lose trailing NULs, a limitation of OpenVINO's Python API.
    """
    if spec.datatype is BYTES:
        tensor = ov.Tensor(ov.Type.string, ov.Shape(array.shape))
        if array.size:
            tensor.bytes_data = array.astype("S")
        return tensor
    # Unlike `Tensor(array, shared_memory=True)`, this constructor accepts read-only arrays, such as views of bytes.
    return ov.Tensor(array, ov.Shape(array.shape), _TYPES[spec.datatype.name])


def from_tensor(tensor: ov.Tensor, spec: TensorSpec) -> Array:
    """Copy a tensor into an array of dtype ``spec.datatype.numpy``."""
    if spec.datatype is BYTES:
        # For an empty tensor, OpenVINO searches the longest string outside the tensor's memory.
        strings: Array = tensor.bytes_data.astype(object) if tensor.get_size() else np.empty(list(tensor.shape), object)
        return strings
    copy: Array = tensor.data.copy()
    return copy if copy.dtype == spec.datatype.numpy else copy.view(spec.datatype.numpy)


def tensor_view(tensor: ov.Tensor, spec: TensorSpec) -> Array:
    """Return a view of a tensor with dtype ``spec.datatype.numpy``, valid as long as the tensor; for strings a copy."""
    if spec.datatype is BYTES:
        return from_tensor(tensor, spec)
    view: Array = tensor.data
    return view if view.dtype == spec.datatype.numpy else view.view(spec.datatype.numpy)


def _smallest_shape(spec: TensorSpec, more: int = 0) -> list[int]:
    smallest = [1 if dim.accepts(1) else dim.low for dim in spec.shape]
    return [size + more if dim.accepts(size + more) else size for size, dim in zip(smallest, spec.shape, strict=True)]


def placeholder(spec: TensorSpec, extra: int = 0, *, value: int = 1) -> Array:
    """Create the smallest input of ones; dynamic dimensions are larger by ``extra``.

    Zeros are unsafe: OpenVINO 2026.4 divides by a step of 0 in ``Range``, which ends the process. Strings are ``1``, or
    empty for a ``value`` of 0.
    """
    shape = _smallest_shape(spec, extra)
    if spec.datatype is BYTES:
        return np.full(shape, str(value).encode() if value else b"", dtype=object)
    filled = np.full(shape, value, np.float32 if spec.datatype.name == "BF16" else spec.datatype.numpy)
    return to_bf16(filled) if spec.datatype.name == "BF16" else filled


def idle_tensor(spec: TensorSpec) -> ov.Tensor:
    """Create a tensor for an idle request to hold, in OpenVINO's own memory."""
    return ov.Tensor(_TYPES[spec.datatype.name], ov.Shape(_smallest_shape(spec)))


def set_inputs(request: ov.InferRequest, ports: Sequence[int], tensors: Sequence[ov.Tensor]) -> None:
    """Set the inputs of a request; earlier ones are released."""
    for port, tensor in zip(ports, tensors, strict=True):
        request.set_input_tensor(port, tensor)


State = Mapping[str, Array]
"""Value of each variable by name; immutable."""

# Values up to this size are copied into a reused tensor, which costs less than a new one.
_MAX_COPIED_BYTES: Final = 16 * 1024


def read_variables(model: ov.Model, file: str) -> tuple[TensorSpec, ...]:
    """Return the specs of a model's variables, sorted by name; ConfigError if an element type is not supported."""
    variables = [_variable(variable.info, file) for variable in model.get_variables()]
    return tuple(sorted(variables, key=lambda variable: variable.name))


def _variable(info: Any, file: str) -> TensorSpec:
    datatype = BY_OPENVINO_NAME.get(info.data_type.get_type_name())
    if datatype is None or datatype is BYTES:
        message = f"variable {info.variable_id!r} has the unsupported element type {info.data_type}"
        raise ConfigError([Problem(message, file=file, path="stateful")])
    return TensorSpec(info.variable_id, datatype, dims_of(info.data_shape), None)


class _Variable(NamedTuple):
    """Variable of a request; ``own`` is a reused tensor and ``view`` its memory, None for dynamic or large values."""

    spec: TensorSpec
    handle: Any
    own: ov.Tensor | None
    view: Array | None

    def set(self, value: Array) -> None:
        view = self.view
        if view is None or value.shape != view.shape or value.dtype != view.dtype:
            self.handle.state = to_tensor(value, self.spec)
        else:
            view[...] = value
            self.handle.state = self.own


# Cache, because OpenVINO creates new handles at each query.
_variable_cache: Final[WeakKeyDictionary[ov.InferRequest, Sequence[_Variable]]] = WeakKeyDictionary()


def _variables_of(request: ov.InferRequest, specs: Mapping[str, TensorSpec]) -> Sequence[_Variable]:
    found = _variable_cache.get(request)
    if found is None:
        found = _variable_cache[request] = [_look_up(handle, specs[handle.name]) for handle in request.query_state()]
    return found


def _look_up(handle: Any, spec: TensorSpec) -> _Variable:
    if not all(dim.is_fixed for dim in spec.shape):
        return _Variable(spec, handle, None, None)
    own = idle_tensor(spec)
    if own.byte_size > _MAX_COPIED_BYTES:
        return _Variable(spec, handle, None, None)
    return _Variable(spec, handle, own, tensor_view(own, spec))


class StateChange:
    """State of a model before one inference (None for the initial one), and after it if ``keep`` is set."""

    __slots__ = ("_before", "_entered", "_keep", "_variables", "after")

    def __init__(self, variables: Mapping[str, TensorSpec], before: State | None, *, keep: bool) -> None:
        self._variables = variables
        self._before = before
        self._keep = keep
        self._entered: Sequence[_Variable] = ()
        self.after: State = {}

    def enter(self, request: ov.InferRequest) -> None:
        """Set the state of a request; raise ModelFailure if OpenVINO refuses the state."""
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
            raise ModelFailure(
                f"OpenVINO rejects the state of the sequence: {openvino_error_message(error)}"
            ) from error

    def leave(self, request: ov.InferRequest) -> None:
        """Copy the state of the request into ``after``; raise ModelFailure if OpenVINO does not return the state."""
        if not self._variables or not self._keep:
            return
        try:
            self.after = {
                variable.spec.name: from_tensor(variable.handle.state, variable.spec)
                for variable in self._entered or _variables_of(request, self._variables)
            }
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"cannot read the state of the sequence: {openvino_error_message(error)}") from error
