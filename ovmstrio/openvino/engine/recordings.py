"""Files of sound as samples, read bit by bit: however long a recording is, only the next window of it is in memory."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
import soundfile
import soxr

from ovmstrio.core.errors import InvalidField

__all__ = ["RATE", "Recording"]

RATE: Final = 16_000
"""Samples a second that models of speech take."""

_LONGEST_SECONDS: Final = 4 * 3600
_SHORTEST_SECONDS: Final = 0.1
_RATES: Final = range(1000, 768_001)
_BLOCK_SAMPLES: Final = 2**18
_UNKNOWN: Final = 2**63 - 1
"""How many frames the library says that a file has which does not tell, as programs write it into pipes."""
_FORMS: Final = "wav, flac, ogg (Vorbis, Opus) or mp3"
_FIELD: Final = "file"
_TOO_LONG: Final = f"a recording may have {_LONGEST_SECONDS // 3600} hours; cut it into several files"

Samples = np.ndarray[Any, np.dtype[np.float32]]


class _SoundStream(soundfile.SoundFile):  # type: ignore[misc]  # the library has no types
    """A file that is read from its beginning to its end.

    One that can be sought in is sought in behind each block, which fails for files that do not tell their length.
    """

    def seekable(self) -> bool:
        """Say that nothing is sought in it."""
        return False


class Recording:
    """One file, whose samples are asked for from its beginning to its end.

    Args:
        data: the file.

    Raises:
        InvalidField: it is empty, no sound, too short or too long.
    """

    def __init__(self, data: bytes) -> None:
        if not data:
            raise InvalidField("the file is empty", field=_FIELD)
        try:
            self._file = _SoundStream(io.BytesIO(data))
        except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
            message = f"Received input file is not a valid audio file; expected {_FORMS}"
            raise InvalidField(message, field=_FIELD, got=_shown(data)) from error
        rate, channels = self._file.samplerate, self._file.channels
        if rate not in _RATES:
            message = f"a recording has {_RATES.start} to {_RATES.stop - 1} samples a second"
            raise InvalidField(message, field=_FIELD, got=str(rate))
        if _LONGEST_SECONDS * rate < self._file.frames != _UNKNOWN:
            raise InvalidField(_TOO_LONG, field=_FIELD, got=f"{self._file.frames / rate / 3600:.1f} hours")
        self._frames = max(1, _BLOCK_SAMPLES // channels)
        self._resampler = None if rate == RATE else soxr.ResampleStream(rate, RATE, 1, dtype="float32")
        self._ready: Samples = np.empty(0, np.float32)
        self._start = 0
        self._is_whole = False
        if len(self.window(0, RATE)) < _SHORTEST_SECONDS * RATE:
            message = f"Audio file is too short. Minimum audio length is {_SHORTEST_SECONDS} seconds."
            raise InvalidField(message, field=_FIELD)

    def window(self, start: int, length: int) -> Samples:
        """Give up to ``length`` samples from ``start`` on, 16 kHz, one channel; those before are forgotten.

        Raises:
            InvalidField: the file cannot be read any further.
        """
        self._ready = self._ready[start - self._start :]
        self._start = start
        parts, have = [self._ready], len(self._ready)
        # One more than is asked for tells whether that is the end.
        while have <= length and not self._is_whole:
            parts.append(self._read())
            have += len(parts[-1])
            if start + have > _LONGEST_SECONDS * RATE:
                raise InvalidField(_TOO_LONG, field=_FIELD)
        self._ready = np.concatenate(parts) if len(parts) > 1 else self._ready
        return self._ready[:length]

    def ends_at(self, end: int) -> bool:
        """Tell whether nothing comes behind a window that has been read up to ``end``."""
        return self._is_whole and self._start + len(self._ready) <= end

    @property
    def seconds(self) -> float:
        """How long what has been read is."""
        return (self._start + len(self._ready)) / RATE

    def _read(self) -> Samples:
        try:
            block = self._file.read(self._frames, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, RuntimeError) as error:
            message = f"the file cannot be read beyond {self.seconds:.1f} seconds: it is damaged"
            raise InvalidField(message, field=_FIELD) from error
        self._is_whole = len(block) < self._frames
        mono: Samples = block.mean(axis=1, dtype=np.float32)
        mono = np.clip(np.nan_to_num(mono), -1, 1)
        return mono if self._resampler is None else self._resampler.resample_chunk(mono, last=self._is_whole)


def _shown(data: bytes) -> str:
    return f"{len(data)} bytes that begin with {bytes(data[:8])!r}"
