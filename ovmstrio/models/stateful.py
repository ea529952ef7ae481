"""Servable of a stateful OpenVINO model; each sequence of requests has its own state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.request import RESTORED_STEPS, SEQUENCE_ID, InferRequest, InferResponse
from ovmstrio.core.tensor import BY_NAME, BYTES, Tensor
from ovmstrio.core.worker_peers import ForwardedStep, StepResult
from ovmstrio.inference.tensors import StateChange
from ovmstrio.models.sequences.requests import SPECIAL_INPUTS, SequenceControl, read_control
from ovmstrio.models.servable import NetworkServable, model_metadata, named_outputs
from ovmstrio.models.validation import Validator
from ovmstrio.util.truncation import utf8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ovmstrio.config.specs import ModelSpec
    from ovmstrio.core.request import ServableMetadata
    from ovmstrio.core.service import SequenceInfo
    from ovmstrio.core.tensor import Array
    from ovmstrio.core.worker_peers import SequenceOwners
    from ovmstrio.inference.network import Network
    from ovmstrio.inference.signature import ModelSignature
    from ovmstrio.models.sequences.manager import SequenceManagers


class StatefulServable(NetworkServable):
    """Servable that validates requests and runs each with the state of its sequence.

    Raises:
        ConfigError: an input or output has a reserved name of the sequence protocol.
    """

    def __init__(
        self,
        spec: ModelSpec,
        version: int,
        network: Network,
        managers: SequenceManagers,
        owners: SequenceOwners | None = None,
    ) -> None:
        _check_names(spec, network.signature)
        super().__init__(spec, version, network)
        self.metadata: ServableMetadata = replace(model_metadata(spec.name, network.signature), has_sequences=True)
        self._validate = Validator(network.signature.inputs)
        self._variables = {variable.name: variable for variable in network.variables}
        self._managers = managers
        self._manager = managers.open(spec, version, network.variables)
        self._owners = owners

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run one request; return all outputs of the model, sorted by name, and ``sequence_id``.

        Requests of one sequence run in order of arrival, different sequences concurrently. A failed or cancelled
        request does not change its sequence. The buffers of the request must not change until this returns.

        Raises:
            InvalidRequest: the request does not match the inputs, or names no sequence.
            ModelFailure: OpenVINO failed on a valid request.
            ServerError: see :meth:`SequenceManager.admit`.
        """
        control, plain = read_control(request)
        arrays = self._validate(plain)
        outputs, restored_steps = await self._answer(control, arrays, request)
        response = InferResponse(self.name, self.version, outputs, request.id, is_private=True)
        if restored_steps is not None:
            response.parameters[RESTORED_STEPS] = restored_steps
        return response

    async def _answer(self, control: SequenceControl, arrays: Mapping[str, Array], request: InferRequest) -> StepResult:
        is_default_version = not request.model_version.strip("0")
        owners = self._owners
        owner = owners.owner(self.name, control.id) if owners is not None and control.id else None
        if owners is None or owner is None:
            return await self._run(control, arrays, request, is_default_version=is_default_version)
        version = "" if is_default_version else self.version
        return await owners.run_step(
            owner, ForwardedStep(self.name, version, *control, arrays, request.max_output_bytes)
        )

    async def run_step(self, step: ForwardedStep) -> StepResult:
        """Run a request forwarded by another worker; see :meth:`infer`."""
        request = InferRequest(self.name, step.version, max_output_bytes=step.max_output_bytes)
        control = SequenceControl(step.id, step.start, step.end)
        return await self._run(control, step.arrays, request, is_default_version=not step.version)

    async def _run(
        self, control: SequenceControl, arrays: Mapping[str, Array], request: InferRequest, *, is_default_version: bool
    ) -> StepResult:
        network = self._network
        if network is None:
            raise trio.ClosedResourceError
        async with self._manager.turn(control, is_default_version=is_default_version) as sequence:
            change = StateChange(self._variables, sequence.state, keep=not control.end)
            results = await network.infer(tuple(arrays.values()), change, request.event, request.max_output_bytes)
            outputs = named_outputs(network.signature, results)
            restored_steps = sequence.requests if sequence.lost_seconds else None
            sequence.advance(change.after)
        outputs.append(_id_tensor(sequence.id))
        return StepResult(outputs, restored_steps)

    def sequences(self) -> list[SequenceInfo]:
        """Return the live sequences by id, numbers before texts."""
        return sorted(
            (sequence.info for sequence in self._manager), key=lambda info: (isinstance(info.id, str), info.id)
        )

    async def aclose(self) -> None:
        """Unload the model; called once, with no call in flight. Never waits."""
        self._network = None
        self._managers.close(self._manager)


def _id_tensor(identity: int | str) -> Tensor:
    if isinstance(identity, str):
        return Tensor(SEQUENCE_ID, BYTES, np.array([utf8(identity)], object))
    return Tensor(SEQUENCE_ID, BY_NAME["UINT64"], np.array([identity], np.uint64))


def _check_names(spec: ModelSpec, signature: ModelSignature) -> None:
    problems = [
        Problem(
            f"the {kind} {tensor.name!r} has a reserved name of the sequence protocol",
            file=spec.origin,
            path="stateful",
            suggestion="rename it in mapping_config.json",
        )
        for kind, tensors, reserved in (
            ("input", signature.inputs, SPECIAL_INPUTS),
            ("output", signature.outputs, (SEQUENCE_ID,)),
        )
        for tensor in tensors
        if tensor.name in reserved
    ]
    if problems:
        raise ConfigError(problems)
