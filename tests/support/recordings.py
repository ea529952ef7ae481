"""WAV files of tones for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    times = np.arange(round(seconds * rate)) / rate
    return (0.5 * np.sin(2 * np.pi * hertz * times)).astype(np.float32)


def wave_file(seconds: float, rate: int = 16_000, channels: int = 1, kind: str = "WAV") -> bytes:
    file = io.BytesIO()
    sound = np.repeat(tone(seconds, rate)[:, None], channels, axis=1)
    soundfile.write(file, sound, rate, format=kind)
    return file.getvalue()
