"""Sequence steps of requests to remote models."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import SEQUENCE_CONTROL, SEQUENCE_ID
from ovmstrio.core.tensor import RawTensor
from ovmstrio.models.sequences.requests import read_control

if TYPE_CHECKING:
    from ovmstrio.core.request import InferRequest, InferResponse

_START: Final = "sequence_start"


class SequenceStep(NamedTuple):
    """Sequence parameters of a request; id 0 lets the server choose an id."""

    id: int | str
    starts: bool
    ends: bool


def sequence_step(request: InferRequest) -> SequenceStep | None:
    """Return a request's sequence parameters, or None; invalid ones are left to the remote server's validation."""
    named = SEQUENCE_ID in request.parameters or _START in request.parameters
    if not named and not any(given.name in {SEQUENCE_ID, SEQUENCE_CONTROL} for given in request.inputs):
        return None
    with suppress(ServerError):
        control, _ = read_control(request)
        return SequenceStep(control.id, control.start, control.end)
    return SequenceStep(0, starts=False, ends=False)


def server_sequence_id(response: InferResponse) -> int | str:
    """Return the sequence id that the server chose, 0 if none."""
    details = response.parameters.get(SEQUENCE_ID, 0)
    if isinstance(details, int | str) and details:
        return details
    for output in response.outputs:
        if output.name == SEQUENCE_ID:
            raw = output.data if isinstance(output, RawTensor) else output.array.tobytes()
            return int.from_bytes(raw, "little")
    return 0
