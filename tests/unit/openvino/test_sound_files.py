"""Files of sound as they are written bit by bit."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from ovmstrio.openvino.engine.recordings import RATE, Recording
from ovmstrio.openvino.engine.sound_files import sound_writer
from tests.support.recordings import tone

SECONDS = 3.0


def _write(form: str, rate: int, *, is_streamed: bool) -> list[bytes]:
    """Write three seconds of a tone, a second at a time."""
    writer = sound_writer(form, rate, is_streamed=is_streamed)
    parts = [writer.write(part) for part in np.split(tone(SECONDS, rate), 3)]
    return [*parts, writer.close()]


@pytest.mark.parametrize("rate", [16_000, 20_000, 22_050, 24_000])
@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus"])
def test_what_is_streamed_can_be_read_as_what_is_whole(form: str, rate: int) -> None:
    """As long as it is, and as loud; a whole file comes at its end, a streamed one with each part."""
    whole = _write(form, rate, is_streamed=False)
    streamed = _write(form, rate, is_streamed=True)

    assert ([len(part) > 0 for part in whole], all(streamed[:3])) == ([False, False, False, True], True)
    for data in (whole[-1], b"".join(streamed)):
        heard = Recording(data).window(0, round(2 * SECONDS * RATE))
        assert len(heard) / RATE == pytest.approx(SECONDS, abs=0.15)
        middle = heard[RATE : 2 * RATE]
        assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


def test_a_whole_wav_has_the_samples_as_they_were() -> None:
    """32-bit floats, also those beyond 1."""
    samples = np.array([0.1, -0.2, 1.5], np.float32)
    writer = sound_writer("wav", 22_050, is_streamed=False)
    writer.write(samples)
    file = soundfile.SoundFile(io.BytesIO(writer.close()))
    with file:
        assert (file.samplerate, file.subtype, file.frames) == (22_050, "FLOAT", 3)
        assert file.read(dtype="float32").tolist() == samples.tolist()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_samples_without_a_head_have_the_rate_that_clients_expect(is_streamed: bool) -> None:
    """24 kHz and 16 bits; what is too loud is cut, and does not turn over."""
    parts = _write("pcm", 22_050, is_streamed=is_streamed)
    sound = np.frombuffer(b"".join(parts), "<i2")
    loud = sound_writer("pcm", 24_000, is_streamed=True).write(np.array([2, -2, 0.5], np.float32))

    assert len(sound) == 3 * 24_000
    assert bool(parts[0]) is is_streamed
    assert np.frombuffer(loud, "<i2").tolist() == [32767, -32767, 16383]
