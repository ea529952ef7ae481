"""What a request says of its sequence, read only as far as its way to a server depends on it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ovmstrio.core.errors import ServerError
from ovmstrio.core.request import SEQUENCE_CONTROL, SEQUENCE_ID
from ovmstrio.core.tensor import RawTensor
from ovmstrio.runtimes.models.sequences.sequence_requests import read_control

if TYPE_CHECKING:
    from ovmstrio.core.request import InferRequest, InferResponse

__all__ = ["SequenceStep", "given_id", "step_of"]

_START: Final = "sequence_start"


class SequenceStep(NamedTuple):
    """One request of a sequence; the id is 0 where the server is to choose it."""

    id: int | str
    starts: bool
    ends: bool


def step_of(request: InferRequest) -> SequenceStep | None:
    """Read what a request says of its sequence, None if it belongs to none.

    What is wrong with it is for the server to say that has the model.
    """
    named = SEQUENCE_ID in request.parameters or _START in request.parameters
    if not named and not any(given.name in {SEQUENCE_ID, SEQUENCE_CONTROL} for given in request.inputs):
        return None
    with suppress(ServerError):
        control, _ = read_control(request)
        return SequenceStep(control.id, control.start, control.end)
    return SequenceStep(0, starts=False, ends=False)


def given_id(response: InferResponse) -> int | str:
    """Find the id that a server has chosen for a sequence, 0 if it says none."""
    told = response.parameters.get(SEQUENCE_ID, 0)
    if isinstance(told, int | str) and told:
        return told
    for output in response.outputs:
        if output.name == SEQUENCE_ID:
            raw = output.data if isinstance(output, RawTensor) else output.array.tobytes()
            return int.from_bytes(raw, "little")
    return 0
