"""Conversion of sound to mel spectrograms, and of tokens to text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from ovmstrio import Array

__all__ = ["RATE", "SECONDS", "Tokens", "log_mel"]

RATE: Final = 16_000
SECONDS: Final = 30
_WINDOW: Final = 400
_HOP: Final = 160
_MELS: Final = 80
_KNEE_HERTZ: Final = 1000
_KNEE_MEL: Final = 15
_LOG_STEP: Final = np.log(6.4) / 27


def _hertz(mel: Array) -> Array:
    """Convert Slaney's mel scale to hertz: linear up to 1,000, logarithmic above."""
    above = _KNEE_HERTZ * np.exp((mel - _KNEE_MEL) * _LOG_STEP)
    return np.asarray(np.where(mel < _KNEE_MEL, mel * _KNEE_HERTZ / _KNEE_MEL, above))


@cache
def _filters() -> Array:
    """Return the mel filter bank, FP32 [80,201]: triangles of equal area."""
    top = _KNEE_MEL + np.log(RATE / 2 / _KNEE_HERTZ) / _LOG_STEP
    corners = _hertz(np.linspace(0, top, _MELS + 2))
    distance = corners[:, None] - np.fft.rfftfreq(_WINDOW, 1 / RATE)
    width = np.diff(corners)
    rising, falling = -distance[:-2] / width[:-1, None], distance[2:] / width[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return np.asarray(triangles * (2 / (corners[2:] - corners[:-2]))[:, None], np.float32)


def log_mel(sound: Array) -> Array:
    """Return the log-mel spectrogram of the first thirty seconds, 80 bands every 10 ms: FP32 [1,80,3000]."""
    room = np.zeros(SECONDS * RATE, np.float32)
    room[: min(len(sound), len(room))] = sound[: len(room)]
    padded = np.pad(room, _WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP][: len(room) // _HOP]
    spectrum = np.abs(np.fft.rfft(windows * np.hanning(_WINDOW + 1)[:-1], axis=1)) ** 2
    loudness = np.log10(np.maximum(_filters() @ spectrum.T, 1e-10))
    loudness = np.maximum(loudness, loudness.max() - 8)
    return np.asarray((loudness + 4) / 4, np.float32)[np.newaxis]


@cache
def _bytes() -> Mapping[str, int]:
    """Return the bytes by character of the byte-level alphabet, which maps non-printable bytes to 256 and above."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens by number."""

    texts: Mapping[int, str]

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Load the tokens from a ``tokenizer.json``."""
        table: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
        return cls({number: text for text, number in table.items()})

    def decode(self, numbers: Iterable[int]) -> str:
        """Join tokens to text."""
        letters = "".join(self.texts.get(number, "") for number in numbers)
        return bytes(_bytes()[letter] for letter in letters).decode(errors="replace")
