"""What a model remembers from one inference to the next: the values of its variables, moved in and out of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openvino as ov

from ovmstrio.core.datatypes import BY_OPENVINO_NAME, BYTES
from ovmstrio.core.errors import ConfigError, ModelFailure, Problem
from ovmstrio.core.tensor import Array, TensorSpec
from ovmstrio.openvino.ov_tensors import from_tensor, to_tensor
from ovmstrio.openvino.runtime import OPENVINO_ERRORS, reason
from ovmstrio.openvino.signature import dims_of

__all__ = ["State", "StateChange", "read_variables"]

State = Mapping[str, Array]
"""The value of each variable, by name; never changed once it is made."""


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


class StateChange:
    """One inference's way from one state to the next, through whichever infer request it gets.

    Args:
        variables: the variables of the model, by name.
        before: the state that the inference begins with; None for the initial one.
        keep: whether the state that it ends with is wanted.
    """

    __slots__ = ("_before", "_keep", "_variables", "after")

    def __init__(self, variables: Mapping[str, TensorSpec], before: State | None, *, keep: bool) -> None:
        self._variables = variables
        self._before = before
        self._keep = keep
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
            for variable in request.query_state():
                spec = self._variables[variable.name]
                variable.state = to_tensor(self._before[spec.name], spec)
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
                variable.name: from_tensor(variable.state, self._variables[variable.name])
                for variable in request.query_state()
            }
        except OPENVINO_ERRORS as error:
            raise ModelFailure(f"OpenVINO does not give the state of the sequence: {reason(error)}") from error
