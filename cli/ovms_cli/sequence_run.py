"""One sequence from its start to its end, which comes whatever happens in between."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Final

from ovms_cli.console import note
from ovmstrio.client.api import cancel_on_interrupt
from ovmstrio.core.errors import InvalidRequest, NotFound, ServerError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ovms_cli.sequence_steps import Steps
    from ovmstrio.client import Client
    from ovmstrio.core.tensor import Array

_SEQUENCE_ID: Final = "sequence_id"
_LARGEST_INTEGER: Final = 2**63 - 1
_IDS: Final = 2**48
"""How many ids there are to choose from: few enough for every JSON reader to keep their digits."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What came of a step, counted from 0, and after how long."""

    step: int
    seconds: float
    outputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class SequenceModel:
    """The model that is called, and how."""

    client: Client
    name: str
    version: str
    datatypes: Mapping[str, str]

    def call(
        self, inputs: Mapping[str, Array], number: int, *, start: bool = False, end: bool = False
    ) -> dict[str, Array]:
        """Call the model in a sequence."""
        # Over gRPC an integer has a sign; larger ids travel as text.
        parameters: dict[str, bool | int | str] = {
            _SEQUENCE_ID: number if number <= _LARGEST_INTEGER else str(number),
            "sequence_start": start,
            "sequence_end": end,
        }
        return self.client.infer(
            self.name, inputs, version=self.version, datatypes=self.datatypes, parameters=parameters
        )


def new_id() -> int:
    """Choose an id that hardly anybody else has.

    The server would choose one, too, but not tell it to a client that is interrupted while it starts the sequence.
    """
    return secrets.randbelow(_IDS) + 1


def stream_steps(model: SequenceModel, steps: Steps, number: int) -> Generator[StepAnswer]:
    """Make one call a step, the first of which starts the sequence, and the last of which ends it.

    Closing the iterator, an error and Ctrl-C end the sequence on the server; Ctrl-C lets the call that is under way
    finish first, and a second one leaves at once.

    Raises:
        InvalidRequest: the model keeps no sequences.
        ServerError: the server refused a step; the message says which.
        KeyboardInterrupt: Ctrl-C came.
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
                if patience.asked:
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
        raise InvalidRequest(f'"{model.name}" keeps no sequences: was it served without --stateful?')
    return outputs


def _end(model: SequenceModel, inputs: Mapping[str, Array], number: int, patience: _Patience) -> None:
    """End the sequence early; only with a call, whose inputs must fit, and whose answer nobody wants."""
    reason = "interrupted"
    try:
        if not patience.lost:
            model.call(inputs, number, end=True)
            return
    except NotFound:
        # It has ended without us.
        return
    except ServerError as error:
        reason = error.message
    except KeyboardInterrupt:
        # Whoever watches for it raises it once more.
        pass
    note(f"sequence {number} may be left on the server until it is idle for long enough: {reason}")


class _Patience:
    """What becomes of one Ctrl-C after the other."""

    def __init__(self) -> None:
        self.asked = False
        self.lost = False

    def lose(self) -> None:
        """Wait for the server after the first Ctrl-C, and no more after the second.

        Raises:
            KeyboardInterrupt: it is the second one.
        """
        if self.asked:
            self.lost = True
            raise KeyboardInterrupt
        self.asked = True
        note("ending the sequence; Ctrl-C again does not wait for it")
