"""Streaming audio file reader and writers."""

from __future__ import annotations

import io
import struct
from typing import Any, Final, Protocol

import numpy as np
import soundfile
import soxr

from ovmstrio.core.errors import InvalidField

SAMPLE_RATE: Final = 16_000
"""Sample rate of speech models in Hz."""

_MAX_SECONDS: Final = 4 * 3600
_MIN_SECONDS: Final = 0.1
_RATES: Final = range(1000, 768_001)
_BLOCK_SAMPLES: Final = 2**18
_UNKNOWN: Final = 2**63 - 1  # the library's frame count for files of unknown length, as written to pipes
_FORMATS: Final = "wav, flac, ogg (Vorbis, Opus) or mp3"
_FIELD: Final = "file"
_TOO_LONG: Final = f"recording too long: limit {_MAX_SECONDS // 3600} hours; split it into several files"

Samples = np.ndarray[Any, np.dtype[np.float32]]


class _SoundStream(soundfile.SoundFile):  # type: ignore[misc]  # the library has no types
    """Sequential reader; the base class seeks after each block, which fails for files of unknown length."""

    def seekable(self) -> bool:
        return False


class AudioReader:
    """Audio file, decoded sequentially; only the next window of samples is in memory.

    Raises:
        InvalidField: the file is empty, not audio, too short or too long.
    """

    def __init__(self, data: bytes) -> None:
        if not data:
            raise InvalidField("the file is empty", field=_FIELD)
        try:
            self._file = _SoundStream(io.BytesIO(data))
        except (soundfile.SoundFileError, RuntimeError, TypeError) as error:
            message = f"Received input file is not a valid audio file; expected {_FORMATS}"
            got = f"{len(data)} bytes, first {bytes(data[:8])!r}"
            raise InvalidField(message, field=_FIELD, got=got) from error
        rate, channels = self._file.samplerate, self._file.channels
        if rate not in _RATES:
            message = f"sample rate out of range: expected {_RATES.start} to {_RATES.stop - 1} Hz"
            raise InvalidField(message, field=_FIELD, got=str(rate))
        if _MAX_SECONDS * rate < self._file.frames != _UNKNOWN:
            raise InvalidField(_TOO_LONG, field=_FIELD, got=f"{self._file.frames / rate / 3600:.1f} hours")
        self._frames = max(1, _BLOCK_SAMPLES // channels)
        self._resampler = None if rate == SAMPLE_RATE else soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
        self._ready: Samples = np.empty(0, np.float32)
        self._start = 0
        self._is_complete = False
        if len(self.window(0, SAMPLE_RATE)) < _MIN_SECONDS * SAMPLE_RATE:
            message = f"Audio file is too short. Minimum audio length is {_MIN_SECONDS} seconds."
            raise InvalidField(message, field=_FIELD)

    def window(self, start: int, length: int) -> Samples:
        """Return up to ``length`` 16 kHz mono samples from ``start``; raise InvalidField if the file is damaged."""
        self._ready = self._ready[start - self._start :]
        self._start = start
        parts, have = [self._ready], len(self._ready)
        # One sample more than requested shows whether the file ends there.
        while have <= length and not self._is_complete:
            parts.append(self._read())
            have += len(parts[-1])
            if start + have > _MAX_SECONDS * SAMPLE_RATE:
                raise InvalidField(_TOO_LONG, field=_FIELD)
        self._ready = np.concatenate(parts) if len(parts) > 1 else self._ready
        return self._ready[:length]

    def ends_at(self, end: int) -> bool:
        """Return whether the recording ends at or before ``end``, which was read."""
        return self._is_complete and self._start + len(self._ready) <= end

    @property
    def seconds(self) -> float:
        """Length of the part read so far."""
        return (self._start + len(self._ready)) / SAMPLE_RATE

    def _read(self) -> Samples:
        try:
            block = self._file.read(self._frames, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, RuntimeError) as error:
            message = f"the file is damaged after {self.seconds:.1f} seconds"
            raise InvalidField(message, field=_FIELD) from error
        self._is_complete = len(block) < self._frames
        mono: Samples = block.mean(axis=1, dtype=np.float32)
        mono = np.clip(np.nan_to_num(mono), -1, 1)
        return mono if self._resampler is None else self._resampler.resample_chunk(mono, last=self._is_complete)


_PCM_RATE: Final = 24_000  # OpenAI's clients expect this rate for raw samples

_CODED: Final = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}
# Supported sample rates; others are resampled. A voice needs no higher rate for opus.
_CODEC_RATES: Final = {
    "mp3": (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000),
    "opus": (_PCM_RATE,),
}
_OPEN_ENDED: Final = 0xFFFFFFFF
_FLOAT: Final = 3
_BYTES: Final = 4


class AudioWriter(Protocol):
    """Encoder of one audio file."""

    def write(self, samples: Samples) -> bytes:
        """Encode samples from -1 to 1; return the bytes that can be sent."""
        ...

    def close(self) -> bytes:
        """Finish the file; return the remaining bytes."""
        ...


def create_audio_writer(form: str, rate: int, *, is_streamed: bool) -> AudioWriter:
    """Create the encoder of a mono file of ``rate`` Hz.

    ``form`` is ``wav`` (32-bit floats), ``pcm`` (16-bit, 24 kHz, little-endian, no header), ``flac``, ``mp3`` or
    ``opus``. With ``is_streamed`` the header has no length; otherwise all bytes are returned at the end.
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
        return self._encode(samples if self._resampler is None else self._resampler.resample_chunk(samples))

    def close(self) -> bytes:
        rest = np.empty(0, np.float32)
        if self._resampler is not None:
            rest = self._resampler.resample_chunk(rest, last=True)
        last = self._encode(rest)
        return last if self._kept is None else b"".join(self._kept)

    def _encode(self, samples: Samples) -> bytes:
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
        if rate not in _CODEC_RATES.get(form, (rate,)):
            self._resampler = soxr.ResampleStream(rate, _PCM_RATE, 1, dtype="float32")
            rate = _PCM_RATE
        self._sink = _Sink()
        # A constant bit rate lets players estimate the length, which the header does not contain.
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
    """Write-only file object; bytes already taken are immutable, so late header updates are dropped."""

    def __init__(self) -> None:
        self._taken = 0
        self._rest = bytearray()
        self._at = 0

    def take(self) -> bytes:
        taken = bytes(self._rest)
        self._taken += len(taken)
        self._rest.clear()
        return taken

    def write(self, data: bytes) -> int:
        size, start = len(data), self._at - self._taken
        late = bytes(data)[max(0, -start) :]
        start = max(0, start)
        self._rest[start : start + len(late)] = late
        self._at += size
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._taken + len(self._rest))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        del size
        return b""
