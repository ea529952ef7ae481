"""Recordings as the inputs of a model."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from ovms_cli.tensor_files import read_inputs
from ovms_cli.tensor_sounds import decode_wave
from ovmstrio.client import TensorInfo
from ovmstrio.core.errors import InvalidRequest

SOUND = TensorInfo("sound", "FP32", (-1, -1))
NUMBERS = TensorInfo("sound", "INT16", (-1, -1))


def _ignore(_: str) -> None:
    """Take no note."""


def _recording(width: int, frames: bytes, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as writer:
        writer.setparams((channels, width, 16_000, 0, "NONE", ""))
        writer.writeframes(frames)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("width", "frames"),
    [
        (1, bytes([0, 64, 128, 192, 255])),
        (2, np.array([-32_768, -16_384, 0, 16_384, 32_767], "<i2").tobytes()),
        (3, b"".join(value.to_bytes(3, "little", signed=True) for value in (-(2**23), -(2**22), 0, 2**22, 2**23 - 1))),
        (4, np.array([-(2**31), -(2**30), 0, 2**30, 2**31 - 1], "<i4").tobytes()),
    ],
)
def test_samples_of_every_width_are_between_minus_one_and_one(width: int, frames: bytes) -> None:
    """The lowest is -1, the highest one step below 1, or 1 as far as FP32 can tell."""
    samples = decode_wave(_recording(width, frames), "a.wav", SOUND)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, [-1, -0.5, 0, 0.5, 1 - 2.0 ** (1 - 8 * width)], atol=1e-7)


def test_channels_are_rows() -> None:
    """Left and right, which take turns in the file, are apart."""
    frames = np.array([1, -1, 2, -2, 3, -3], "<i2").tobytes()
    samples = decode_wave(_recording(2, frames, channels=2), "a.wav", SOUND)
    assert (samples * 32_768).tolist() == [[1, 2, 3], [-1, -2, -3]]


def test_integers_stay_for_those_who_want_them() -> None:
    """An INT16 input gets the numbers of the file."""
    samples = decode_wave(_recording(2, np.array([5, -7], "<i2").tobytes()), "a.wav", NUMBERS)
    assert (samples.dtype, samples.tolist()) == (np.int16, [5, -7])


def test_a_recording_is_an_input_from_a_file_and_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is known by its suffix, standard input by its beginning; a batch axis is added."""
    content = _recording(2, np.array([16_384], "<i2").tobytes())
    (tmp_path / "a.WAV").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    for argument in (str(tmp_path / "a.WAV"), "-"):
        assert read_inputs([argument], [SOUND], _ignore)["sound"].tolist() == [[0.5]]


@pytest.mark.parametrize("content", [b"", b"RIFF", b"RIFF\0\0\0\0WAVE", _recording(2, b"ab")[:30], b"no sound at all"])
def test_damage_is_said(content: bytes) -> None:
    """A file that is no recording is refused with its name."""
    with pytest.raises(InvalidRequest, match=r"a\.wav: expected a WAV file of PCM samples"):
        decode_wave(content, "a.wav", SOUND)


def test_a_file_that_was_cut_gives_what_is_there() -> None:
    """Half a sample at the end is left out."""
    content = _recording(2, np.array([1, 2, 3], "<i2").tobytes())
    assert (decode_wave(content[:-1], "a.wav", SOUND) * 32_768).tolist() == [1, 2]
