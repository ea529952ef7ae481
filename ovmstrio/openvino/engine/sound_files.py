"""Samples as files of sound, bit by bit: what is written of a file can be sent before the rest of it is there."""

from __future__ import annotations

import struct
from typing import Any, Final, Protocol

import numpy as np
import soundfile
import soxr

__all__ = ["Samples", "SoundWriter", "sound_writer"]

Samples = np.ndarray[Any, np.dtype[np.float32]]

_PCM_RATE: Final = 24_000
"""Samples a second that OpenAI's clients expect where nothing tells the rate."""

_CODED: Final = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}
_RATES: Final = {
    "mp3": (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    "opus": (_PCM_RATE,),
}
"""Samples a second that these can have, of which opus has few, and a voice needs no higher one; others are changed."""
_OPEN_ENDED: Final = 0xFFFFFFFF
_FLOAT: Final = 3
_BYTES: Final = 4


class SoundWriter(Protocol):
    """Writes one file."""

    def write(self, samples: Samples) -> bytes:
        """Write samples from -1 to 1, and give what of the file can be sent."""
        ...

    def close(self) -> bytes:
        """End the file, and give the rest of it."""
        ...


def sound_writer(form: str, rate: int, *, is_streamed: bool) -> SoundWriter:
    """Make what writes a file of one channel.

    Args:
        form: ``wav`` (32-bit floats), ``pcm`` (16 bits, 24 kHz, little-endian, no head), ``flac``, ``mp3``, ``opus``.
        rate: samples a second.
        is_streamed: whether the file is sent while it is written, so that its head does not tell its length; else all
            of it comes at its end.
    """
    if form == "wav":
        return _Wave(rate, is_streamed=is_streamed)
    if form == "pcm":
        return _Pcm(rate, is_streamed=is_streamed)
    return _Coded(form, rate, is_streamed=is_streamed)


class _Wave:
    def __init__(self, rate: int, *, is_streamed: bool) -> None:
        self._rate = rate
        self._kept: list[bytes] | None = None if is_streamed else []
        self._head = self._write_head(None) if is_streamed else b""

    def write(self, samples: Samples) -> bytes:
        data = samples.astype("<f4", copy=False).tobytes()
        if self._kept is not None:
            self._kept.append(data)
            return b""
        head, self._head = self._head, b""
        return head + data

    def close(self) -> bytes:
        if self._kept is None:
            head, self._head = self._head, b""
            return head
        data = b"".join(self._kept)
        return self._write_head(len(data)) + data

    def _write_head(self, size: int | None) -> bytes:
        sizes = (_OPEN_ENDED, _OPEN_ENDED) if size is None else (36 + size, size)
        form = struct.pack("<IHHIIHH", 16, _FLOAT, 1, self._rate, self._rate * _BYTES, _BYTES, 8 * _BYTES)
        return b"RIFF" + struct.pack("<I", sizes[0]) + b"WAVEfmt " + form + b"data" + struct.pack("<I", sizes[1])


class _Pcm:
    def __init__(self, rate: int, *, is_streamed: bool) -> None:
        self._kept: list[bytes] | None = None if is_streamed else []
        self._resampler = None if rate == _PCM_RATE else soxr.ResampleStream(rate, _PCM_RATE, 1, dtype="float32")

    def write(self, samples: Samples) -> bytes:
        return self._give(samples if self._resampler is None else self._resampler.resample_chunk(samples))

    def close(self) -> bytes:
        rest = np.empty(0, np.float32)
        if self._resampler is not None:
            rest = self._resampler.resample_chunk(rest, last=True)
        last = self._give(rest)
        return last if self._kept is None else b"".join(self._kept)

    def _give(self, samples: Samples) -> bytes:
        data = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
        if self._kept is None:
            return data
        self._kept.append(data)
        return b""


class _Coded:
    def __init__(self, form: str, rate: int, *, is_streamed: bool) -> None:
        kind, coding = _CODED[form]
        self._is_streamed = is_streamed
        self._resampler = None
        if rate not in _RATES.get(form, (rate,)):
            self._resampler = soxr.ResampleStream(rate, _PCM_RATE, 1, dtype="float32")
            rate = _PCM_RATE
        self._sink = _Sink()
        # Programs guess the length of what has one rate of bits, of which the head does not tell the number.
        rates = {"bitrate_mode": "CONSTANT", "compression_level": 0.6} if form == "mp3" else {}
        self._file = soundfile.SoundFile(self._sink, "w", rate, 1, subtype=coding, format=kind, **rates)

    def write(self, samples: Samples) -> bytes:
        self._put(samples, is_last=False)
        return self._sink.take() if self._is_streamed else b""

    def close(self) -> bytes:
        if self._resampler is not None:
            self._put(np.empty(0, np.float32), is_last=True)
        self._file.close()
        return self._sink.take()

    def _put(self, samples: Samples, *, is_last: bool) -> None:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        self._file.write(np.clip(samples, -1, 1))


class _Sink:
    """A file of which what has been taken cannot be changed any more, as heads are when the length is known."""

    def __init__(self) -> None:
        self._taken = 0
        self._rest = bytearray()
        self._at = 0

    def take(self) -> bytes:
        """Give what has come since the last time."""
        taken = bytes(self._rest)
        self._taken += len(taken)
        self._rest.clear()
        return taken

    def write(self, data: bytes) -> int:
        """Write where the file stands."""
        size, start = len(data), self._at - self._taken
        late = bytes(data)[max(0, -start) :]
        start = max(0, start)
        self._rest[start : start + len(late)] = late
        self._at += size
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        """Stand elsewhere."""
        self._at = offset + (0, self._at, self._taken + len(self._rest))[whence]
        return self._at

    def tell(self) -> int:
        """Say where the file stands."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Give nothing: what is written is not read again."""
        del size
        return b""
