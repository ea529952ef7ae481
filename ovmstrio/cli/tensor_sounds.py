"""Conversion of WAV files to arrays of samples."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING, Final

import numpy as np

from ovmstrio.core.errors import InvalidRequest

if TYPE_CHECKING:
    from ovmstrio.client import TensorInfo
    from ovmstrio.core.tensor import Array

_HEAD: Final = (b"RIFF", b"WAVE")
_UNSIGNED_BYTES: Final = 1
_THREE_BYTES: Final = 3
_DTYPES: Final = {2: "<i2", 4: "<i4"}


def is_wave(content: bytes) -> bool:
    """Return whether the content begins like a WAV file."""
    return (content[:4], content[8:12]) == _HEAD


def decode_wave(content: bytes, file: str, tensor: TensorInfo) -> Array:
    """Decode a WAV file of integer samples to [samples], or to [channels, samples] for several channels.

    Samples are ``float32`` from -1 to 1; for an ``INT16`` input, 16-bit samples stay unchanged.

    Raises:
        InvalidRequest: the file is damaged, or has another encoding.
    """
    try:
        with wave.open(io.BytesIO(content)) as recording:
            width, channels = recording.getsampwidth(), recording.getnchannels()
            frames = recording.readframes(recording.getnframes())
    except (wave.Error, EOFError, ValueError, ZeroDivisionError) as error:
        raise InvalidRequest(f"{file}: expected a WAV file of PCM samples: {error}") from None
    samples = _samples(frames[: len(frames) // (width * channels) * width * channels], width, file)
    as_given = tensor.datatype == "INT16" and samples.dtype == np.int16
    values = samples if as_given else (samples / (np.iinfo(samples.dtype).max + 1.0)).astype(np.float32)
    return values if channels == 1 else values.reshape(-1, channels).T


def _samples(frames: bytes, width: int, file: str) -> Array:
    """Convert frames to signed integers that use the full range of their type."""
    if width == _UNSIGNED_BYTES:
        return (np.frombuffer(frames, np.uint8) ^ 0x80).view(np.int8)
    if width == _THREE_BYTES:
        wide = np.zeros((len(frames) // width, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(frames, np.uint8).reshape(-1, width)
        return wide.view("<i4").reshape(-1)
    if width not in _DTYPES:
        raise InvalidRequest(f"{file}: expected samples of 1 to 4 bytes, got {width}")
    return np.frombuffer(frames, _DTYPES[width])
