"""Client of the sample pitch, which sends a tone and a chord: ``python -m ovmstrio.samples.pitch.client``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.samples.asking import arguments, main
from ovmstrio.samples.catalog import BY_NAME
from ovmstrio.samples.question import Arrays, Question

__all__ = ["questions", "tones"]

_RATE: Final = 22_050
_SAMPLES: Final = 43_844
_LOWEST: Final = 21
_INPUT: Final = {"pitch_tf": "input_2"}
_NOTE: Final = {"pitch_tf": "note"}


def tones(notes: Sequence[int]) -> Array:
    """Generate two seconds of pure tones, FP32 [1,43844,1]; notes are numbered as in MIDI, where 69 is 440 Hz."""
    seconds = np.arange(_SAMPLES) / _RATE
    waves: list[Array] = [np.sin(2 * np.pi * 440 * 2 ** ((note - 69) / 12) * seconds) for note in notes]
    mixed = np.asarray(0.3 * np.mean(waves, axis=0), np.float32)
    return mixed[np.newaxis, :, np.newaxis]


def _ask(model: str, subject: str, notes: Sequence[int]) -> Question:
    def read(outputs: Arrays) -> str:
        sounding = outputs[_NOTE.get(model, "StatefulPartitionedCall:1")].reshape(-1, 88).mean(axis=0)
        return " ".join(str(_LOWEST + key) for key in np.flatnonzero(sounding > 0.3))

    name = _INPUT.get(model, "serving_default_input_2:0")
    return Question(model, f"{subject}, heard by {model}", {name: tones(notes)}, " ".join(map(str, notes)), read)


def questions() -> list[Question]:
    """Return calls with a tone and a chord for each format of the model."""
    sounds = {"a tone of 440 Hz": (69,), "a C major chord": (60, 64, 67)}
    models = BY_NAME["pitch"].entries
    return [_ask(model, subject, notes) for model in models for subject, notes in sounds.items()]


if __name__ == "__main__":
    main(arguments("Detect the notes of a tone and a chord."), questions())
