"""What a client sends to a pipeline, as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import Array, Dim, Tensor, TensorSpec
from ovmstrio.runtimes.models.rejections import mismatch
from ovmstrio.runtimes.models.validation import Validator
from ovmstrio.runtimes.pipelines.node_signatures import is_open

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.core.datatypes import Datatype
    from ovmstrio.core.request import InferInput, InferRequest

__all__ = ["EntryReader"]


class EntryReader:
    """Reads the requests of one pipeline, whose inputs may be open: whatever a graph behind them takes."""

    __slots__ = ("_specs", "_validate")

    def __init__(self, inputs: Sequence[TensorSpec]) -> None:
        self._specs = {spec.name: spec for spec in inputs}
        self._validate = None if any(map(is_open, inputs)) else Validator(inputs)

    def __call__(self, request: InferRequest) -> dict[str, Tensor]:
        """Give the inputs by name.

        Arrays are read-only views of the request's raw buffers where these are aligned.

        Raises:
            InvalidRequest: the request does not fit.
        """
        if self._validate is not None:
            return {
                name: Tensor(name, self._specs[name].datatype, array) for name, array in self._validate(request).items()
            }
        given = {each.name: each for each in request.inputs}
        specs = {name: self._settle(spec, given.get(name)) for name, spec in self._specs.items()}
        arrays: dict[str, Array] = Validator(list(specs.values()))(request)
        return {name: Tensor(name, specs[name].datatype, array) for name, array in arrays.items()}

    def _settle(self, spec: TensorSpec, given: InferInput | None) -> TensorSpec:
        """Take an open input for what the client says it is."""
        if given is None or not is_open(spec):
            return spec
        datatype: Datatype | None = BY_NAME.get(given.datatype)
        if datatype is None:
            raise mismatch("Invalid input precision", f"one of {', '.join(BY_NAME)}", given.datatype, spec)
        return TensorSpec(spec.name, datatype, tuple(map(Dim.fixed, given.shape)), batch_axis=None)
