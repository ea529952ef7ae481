"""Calls of one sequence, which always ends on the server, also after errors and interrupts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ovmstrio.cli.console import print_message
from ovmstrio.client.api import cancel_on_interrupt
from ovmstrio.core.errors import InvalidRequest, NotFound, ServerError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ovmstrio.cli.sequence_inputs import Steps
    from ovmstrio.client import Client
    from ovmstrio.core.tensor import Array

_SEQUENCE_ID: Final = "sequence_id"
_LARGEST_INTEGER: Final = 2**63 - 1
_IDS: Final = 2**48
"""Number of possible ids: small enough for JSON readers that parse numbers as doubles."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """Outputs and duration of a step, counted from 0."""

    step: int
    seconds: float
    outputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class SequenceModel:
    """A model with the client and the datatypes to call it."""

    client: Client
    name: str
    version: str
    datatypes: Mapping[str, str]

    def call(
        self, inputs: Mapping[str, Array], number: int, *, start: bool = False, end: bool = False
    ) -> dict[str, Array]:
        """Call the model in a sequence."""
        # Integer parameters of gRPC are signed; larger ids are sent as text.
        parameters: dict[str, bool | int | str] = {
            _SEQUENCE_ID: number if number <= _LARGEST_INTEGER else str(number),
            "sequence_start": start,
            "sequence_end": end,
        }
        return self.client.infer(
            self.name, inputs, version=self.version, datatypes=self.datatypes, parameters=parameters
        )


def new_id() -> int:
    """Choose a random id, which is very likely unused.

    If the server chose the id, a client that is interrupted during the first call could not end the sequence.
    """
    return secrets.randbelow(_IDS) + 1


def stream_steps(model: SequenceModel, steps: Steps, number: int) -> Generator[StepAnswer]:
    """Make one call per step: the first starts the sequence, and the last ends it.

    Closing the iterator, an error and Ctrl-C end the sequence on the server. After Ctrl-C the current call finishes
    first; a second Ctrl-C returns at once.

    Raises:
        InvalidRequest: the model is not stateful.
        ServerError: the server refused a step; the message contains its number.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    patience = _Patience()
    last: Mapping[str, Array] | None = None
    with cancel_on_interrupt(patience.lose):
        try:
            for step, inputs in enumerate(steps):
                began = perf_counter()
                outputs = _step(model, inputs, number, step, len(steps))
                last = inputs if step + 1 < len(steps) else None
                yield StepAnswer(step, perf_counter() - began, outputs)
                if patience.interrupted:
                    break
        finally:
            if last is not None:
                _end(model, last, number, patience)


def _step(model: SequenceModel, inputs: Mapping[str, Array], number: int, step: int, total: int) -> dict[str, Array]:
    try:
        outputs = model.call(inputs, number, start=step == 0, end=step + 1 == total)
    except ServerError as error:
        error.message = f"step {step + 1} of {total} in sequence {number}: {error.message}"
        raise
    if outputs.pop(_SEQUENCE_ID, None) is None:
        raise InvalidRequest(f'"{model.name}" is not stateful: was it served without --stateful?')
    return outputs


def _end(model: SequenceModel, inputs: Mapping[str, Array], number: int, patience: _Patience) -> None:
    """End the sequence early. This takes a call with valid inputs, whose outputs are ignored."""
    reason = "interrupted"
    try:
        if not patience.lost:
            model.call(inputs, number, end=True)
            return
    except NotFound:
        # The sequence has already ended.
        return
    except ServerError as error:
        reason = error.message
    except KeyboardInterrupt:
        # ``cancel_on_interrupt`` raises it again.
        pass
    print_message(f"sequence {number} may remain on the server until its idle timeout: {reason}")


class _Patience:
    """State after the first and the second Ctrl-C."""

    def __init__(self) -> None:
        self.interrupted = False
        self.lost = False

    def lose(self) -> None:
        """Record a Ctrl-C: after the first the sequence ends on the server, the second does not wait for that.

        Raises:
            KeyboardInterrupt: this is the second Ctrl-C.
        """
        if self.interrupted:
            self.lost = True
            raise KeyboardInterrupt
        self.interrupted = True
        print_message("ending the sequence; press Ctrl-C again to exit at once")
