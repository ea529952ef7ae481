"""Files of sound: what they are read as, in which pieces, and which are refused."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import InvalidField
from ovmstrio.openvino.engine.recordings import RATE, Recording
from tests.support.recordings import tone, wave_file


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (48_000, 2), (8_000, 1)])
def test_any_file_becomes_one_channel_of_sixteen_kilohertz(kind: str, rate: int, channels: int) -> None:
    """The same tone, as long and as high as it was."""
    recording = Recording(wave_file(1.0, rate, channels, kind))

    sound = recording.window(0, 30 * RATE)

    assert recording.ends_at(30 * RATE)
    assert abs(len(sound) - RATE) < 0.1 * RATE
    assert recording.seconds == len(sound) / RATE
    spectrum = np.abs(np.fft.rfft(sound[2000:14_000] * np.hanning(12_000)))
    assert abs(int(spectrum.argmax()) * RATE / 12_000 - 440) < 5
    assert 0.4 < float(np.abs(sound[2000:14_000]).max()) < 0.6


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12))
def test_windows_that_follow_each_other_are_the_recording(lengths: list[int]) -> None:
    """However large they are, and whatever is looked at twice."""
    recording = Recording(wave_file(2.0))
    whole = soundfile.read(io.BytesIO(wave_file(2.0)), dtype="float32")[0]
    start = 0
    for length in lengths:
        sound = recording.window(start, length)
        assert np.array_equal(sound, whole[start : start + length])
        assert recording.ends_at(start + length) is (start + length >= len(whole))
        start = min(start + length // 2, len(whole))


def test_numbers_that_are_none_are_silence() -> None:
    """A file may hold infinities, which nothing could be made of."""
    file = io.BytesIO()
    soundfile.write(file, np.array([np.nan, np.inf, -np.inf, 3.0] * 1000, np.float32), RATE, "FLOAT", format="WAV")

    sound = Recording(file.getvalue()).window(0, RATE)

    assert sound[:4].tolist() == [0, 1, -1, 1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"no sound at all", "not a valid audio file; expected wav, flac, ogg"),
        (b"RIFF\x00\x00\x00\x00WAVE", "not a valid audio file"),
        (wave_file(1.0)[:40], "not a valid audio file|too short"),
        (wave_file(0.05), "Audio file is too short. Minimum audio length is 0.1 seconds."),
        (wave_file(0.0), "Audio file is too short"),
        (wave_file(1.0, 500), "a recording has 1000 to 768000 samples a second; got 500"),
    ],
)
def test_what_cannot_be_heard_is_refused(data: bytes, said: str) -> None:
    """With the field that it came in."""
    with pytest.raises(InvalidField, match=said) as caught:
        Recording(data)
    assert caught.value.field == "file"


def test_a_recording_of_more_than_four_hours_is_refused_before_it_is_read() -> None:
    """A small file may hold a very long silence."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4 * 3600 * 1000 + 1, np.int16), 1000, format="FLAC")

    with pytest.raises(InvalidField, match="a recording may have 4 hours"):
        Recording(file.getvalue())


def test_a_file_that_lies_about_its_length_ends_where_its_sound_does() -> None:
    """As one that was cut off, or that a program has streamed without knowing how long it would be."""
    data = bytearray(wave_file(2.0))
    struct.pack_into("<I", data, 4, 2**31)
    struct.pack_into("<I", data, 40, 2**31 - 40)

    recording = Recording(bytes(data[: len(data) // 2]))

    assert len(recording.window(0, 9 * RATE)) == pytest.approx(RATE, abs=200)
    assert np.allclose(recording.window(0, 8000), tone(0.5), atol=1e-3)


@pytest.mark.parametrize("rate", [RATE, 8000])
def test_a_flac_file_that_does_not_tell_its_length_is_read_to_its_end(rate: int) -> None:
    """As programs write it that send it through a pipe."""
    data = bytearray(wave_file(40.0, rate, kind="FLAC"))
    assert data[:4] == b"fLaC"
    data[21] &= 0xF0
    data[22:26] = bytes(4)

    recording = Recording(bytes(data))
    first = recording.window(0, 30 * RATE)
    assert not recording.ends_at(30 * RATE)
    rest = recording.window(30 * RATE, 30 * RATE)

    assert recording.ends_at(60 * RATE)
    assert len(first) + len(rest) == 40 * RATE
    assert recording.seconds == 40.0
