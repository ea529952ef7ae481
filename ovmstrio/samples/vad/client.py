"""Client of the sample vad: ``python -m ovmstrio.samples.vad.client --input RECORDING.wav`` (16 kHz, 16 bits, mono)."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array
from ovmstrio.samples.asking import arguments, connect
from ovmstrio.samples.question import Ask

__all__ = ["read_wave", "speech"]

RATE: Final = 16_000
_CHUNK: Final = 512
_CONTEXT: Final = 64


def read_wave(path: Path) -> Array:
    """Load a recording as FP32 between -1 and 1.

    Raises:
        ValueError: the recording does not have 16 kHz, 16 bits and one channel.
    """
    with wave.open(str(path), "rb") as recording:
        form = recording.getframerate(), recording.getsampwidth(), recording.getnchannels()
        if form != (RATE, 2, 1):
            raise ValueError(f"{path}: expected 16000 Hz, 2 bytes, 1 channel, got {form}")
        frames = recording.readframes(recording.getnframes())
    return np.frombuffer(frames, "<i2").astype(np.float32) / 32_768


def speech(ask: Ask, sound: Array) -> Iterator[float]:
    """Stream the probability of speech for each 32 ms; pass the model's state from call to call."""
    state = np.zeros((2, 1, 128), np.float32)
    padded = np.concatenate([np.zeros(_CONTEXT, np.float32), sound])
    for start in range(0, len(sound) - _CHUNK + 1, _CHUNK):
        window = padded[start : start + _CONTEXT + _CHUNK][np.newaxis]
        outputs = ask("vad", {"input": window, "state": state})
        state = outputs["stateN"]
        yield float(outputs["output"].reshape(-1)[0])


def _print_passages(probabilities: Iterator[float]) -> None:
    speaking = False
    chunk = 0
    for chunk, probability in enumerate(probabilities, start=1):
        if (probability > 0.5) != speaking:
            speaking = not speaking
            print(f"{(chunk - 1) * _CHUNK / RATE:7.2f} s  {'speech' if speaking else 'silence'}")
    print(f"{chunk * _CHUNK / RATE:7.2f} s  end")


if __name__ == "__main__":
    options = arguments("Detect speech in recordings.", model="vad", file="RECORDING", required=True)
    with connect(options) as ask_server:
        for file in options.input:
            print(file)
            _print_passages(speech(ask_server, read_wave(file)))
