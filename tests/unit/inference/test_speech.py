from __future__ import annotations

import io
import struct
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.core.errors import InvalidField, ModelFailure
from ovmstrio.inference.engine import asr as hearing
from ovmstrio.inference.engine import speech_program
from ovmstrio.inference.engine import speech_program as speakers
from ovmstrio.inference.engine.asr import WindowTranscript
from ovmstrio.inference.engine.audio_files import SAMPLE_RATE, AudioReader, create_audio_writer
from ovmstrio.inference.engine.speech_program import MAX_SENTENCE_CHARACTERS, PipelineSpeaker, split_sentences
from ovmstrio.inference.engine.transcription_program import serve
from tests.support.recordings import tone, wave_file
from tests.support.scripted_channel import ScriptedChannel

SECONDS = 3.0


def _write(form: str, rate: int, *, is_streamed: bool) -> list[bytes]:
    writer = create_audio_writer(form, rate, is_streamed=is_streamed)
    parts = [writer.write(part) for part in np.split(tone(SECONDS, rate), 3)]
    return [*parts, writer.close()]


@pytest.mark.parametrize("rate", [16_000, 20_000, 22_050, 24_000])
@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus"])
def test_streamed_and_complete_files_have_the_same_sound(form: str, rate: int) -> None:
    complete = _write(form, rate, is_streamed=False)
    streamed = _write(form, rate, is_streamed=True)
    assert ([len(part) > 0 for part in complete], all(streamed[:3])) == ([False, False, False, True], True)
    for data in (complete[-1], b"".join(streamed)):
        heard = AudioReader(data).window(0, round(2 * SECONDS * SAMPLE_RATE))
        assert len(heard) / SAMPLE_RATE == pytest.approx(SECONDS, abs=0.15)
        middle = heard[SAMPLE_RATE : 2 * SAMPLE_RATE]
        assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


def test_wav_file_has_the_exact_samples() -> None:
    samples = np.array([0.1, -0.2, 1.5], np.float32)
    writer = create_audio_writer("wav", 22_050, is_streamed=False)
    writer.write(samples)
    file = soundfile.SoundFile(io.BytesIO(writer.close()))
    with file:
        assert (file.samplerate, file.subtype, file.frames) == (22_050, "FLOAT", 3)
        assert file.read(dtype="float32").tolist() == samples.tolist()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_pcm_has_24_khz_and_clips_loud_samples(is_streamed: bool) -> None:
    parts = _write("pcm", 22_050, is_streamed=is_streamed)
    sound = np.frombuffer(b"".join(parts), "<i2")
    loud = create_audio_writer("pcm", 24_000, is_streamed=True).write(np.array([2, -2, 0.5], np.float32))
    assert len(sound) == 3 * 24_000
    assert bool(parts[0]) is is_streamed
    assert np.frombuffer(loud, "<i2").tolist() == [32767, -32767, 16383]


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF"])
@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (48_000, 2), (8_000, 1)])
def test_any_file_becomes_one_channel_of_16_khz(kind: str, rate: int, channels: int) -> None:
    recording = AudioReader(wave_file(1.0, rate, channels, kind))
    sound = recording.window(0, 30 * SAMPLE_RATE)
    assert recording.ends_at(30 * SAMPLE_RATE)
    assert abs(len(sound) - SAMPLE_RATE) < 0.1 * SAMPLE_RATE
    assert recording.seconds == len(sound) / SAMPLE_RATE
    spectrum = np.abs(np.fft.rfft(sound[2000:14_000] * np.hanning(12_000)))
    assert abs(int(spectrum.argmax()) * SAMPLE_RATE / 12_000 - 440) < 5
    assert 0.4 < float(np.abs(sound[2000:14_000]).max()) < 0.6


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12))
def test_consecutive_windows_are_the_recording(lengths: list[int]) -> None:
    recording = AudioReader(wave_file(2.0))
    whole = soundfile.read(io.BytesIO(wave_file(2.0)), dtype="float32")[0]
    start = 0
    for length in lengths:
        sound = recording.window(start, length)
        assert np.array_equal(sound, whole[start : start + length])
        assert recording.ends_at(start + length) is (start + length >= len(whole))
        start = min(start + length // 2, len(whole))


def test_invalid_numbers_are_silence_and_loud_ones_are_clipped() -> None:
    file = io.BytesIO()
    soundfile.write(
        file, np.array([np.nan, np.inf, -np.inf, 3.0] * 1000, np.float32), SAMPLE_RATE, "FLOAT", format="WAV"
    )
    sound = AudioReader(file.getvalue()).window(0, SAMPLE_RATE)
    assert sound[:4].tolist() == [0, 1, -1, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"no sound at all", "not a valid audio file; expected wav, flac, ogg"),
        (b"RIFF\x00\x00\x00\x00WAVE", "not a valid audio file"),
        (wave_file(1.0)[:40], "not a valid audio file|too short"),
        (wave_file(0.05), "Audio file is too short. Minimum audio length is 0.1 seconds."),
        (wave_file(0.0), "Audio file is too short"),
        (wave_file(1.0, 500), "sample rate out of range: expected 1000 to 768000 Hz; got 500"),
    ],
)
def test_invalid_files_are_refused_by_their_field(data: bytes, message: str) -> None:
    with pytest.raises(InvalidField, match=message) as caught:
        AudioReader(data)
    assert caught.value.field == "file"


def test_recording_of_more_than_four_hours_is_refused_before_it_is_read() -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4 * 3600 * 1000 + 1, np.int16), 1000, format="FLAC")
    with pytest.raises(InvalidField, match="recording too long: limit 4 hours"):
        AudioReader(file.getvalue())


def test_file_of_a_wrong_length_ends_where_its_sound_ends() -> None:
    data = bytearray(wave_file(2.0))
    struct.pack_into("<I", data, 4, 2**31)
    struct.pack_into("<I", data, 40, 2**31 - 40)
    recording = AudioReader(bytes(data[: len(data) // 2]))
    assert len(recording.window(0, 9 * SAMPLE_RATE)) == pytest.approx(SAMPLE_RATE, abs=200)
    assert np.allclose(recording.window(0, 8000), tone(0.5), atol=1e-3)


@pytest.mark.parametrize("rate", [SAMPLE_RATE, 8000])
def test_flac_file_without_a_length_is_read_to_its_end(rate: int) -> None:
    data = bytearray(wave_file(40.0, rate, kind="FLAC"))
    assert data[:4] == b"fLaC"
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    recording = AudioReader(bytes(data))
    first = recording.window(0, 30 * SAMPLE_RATE)
    assert not recording.ends_at(30 * SAMPLE_RATE)
    rest = recording.window(30 * SAMPLE_RATE, 30 * SAMPLE_RATE)
    assert recording.ends_at(60 * SAMPLE_RATE)
    assert len(first) + len(rest) == 40 * SAMPLE_RATE
    assert recording.seconds == 40.0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Ever tried. Ever failed!  No matter?", ["Ever tried.", "Ever failed!", "No matter?"]),
        ('He said "Go." Then he went.', ['He said "Go."', "Then he went."]),
        ("It costs 3.50 at ovms.org now", ["It costs 3.50 at ovms.org now"]),
        ("Dr. Smith and J. Doe, e.g. here, wait. Yes.", ["Dr. Smith and J. Doe, e.g. here, wait.", "Yes."]),
        ("Wait... and see. So", ["Wait... and see.", "So"]),
        ("A title\nA line\n\n- \nThe end", ["A title", "A line", "The end"]),
        ("\u4f60\u597d\u3002\u518d\u89c1\u3002", ["\u4f60\u597d\u3002", "\u518d\u89c1\u3002"]),
        ("a\x00b\tc", ["a b c"]),
        (" ... \n!", []),
        ("5 \u20ac", ["5 \u20ac"]),
    ],
)
def test_text_is_split_after_its_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_long_sentence_is_split_at_pauses_else_words_else_anywhere() -> None:
    clauses = ", ".join(["word " * 20 + "end"] * 5)
    words = "word " * 200
    assert [part.split()[-1] for part in split_sentences(clauses)] == ["end,", "end,", "end"]
    assert {part.split()[-1] for part in split_sentences(words)} == {"word"}
    assert [len(part) for part in split_sentences("x" * 700)] == [300, 300, 100]
    # Characters that are syllables or words are spoken for longer.
    for letter in "\u5b57\uac00\U0001f602":
        assert [len(part) for part in split_sentences(letter * 130)] == [60, 60, 10]
    assert [len(part) for part in split_sentences("\u5b57" * 50 + "\uff0c" + "\u5b57" * 20)] == [51, 20]


def test_time_grows_linearly_with_a_text_of_abbreviations() -> None:
    started = process_time()
    assert "".join(split_sentences("A. " * 200_000)).count("A") == 200_000
    assert process_time() - started < 60


@given(st.text(alphabet=st.sampled_from("ab1. ,;!?\n\"'()\u2026\u3002"), max_size=1500))
def test_no_letter_of_a_text_is_lost(text: str) -> None:
    parts = split_sentences(text)
    letters = [letter for letter in text if letter.isalnum()]
    assert [letter for letter in "".join(parts) if letter.isalnum()] == letters
    assert all(0 < len(part) <= MAX_SENTENCE_CHARACTERS for part in parts)


_OPTIONS = {"voice": "", "language": "", "speed": 1.0, "form": "wav"}


def test_complete_file_has_a_maximum_length_and_a_streamed_one_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twenty_minutes = np.zeros(1200, np.float32), 1
    speaker = SimpleNamespace(voices=(), check=lambda *_: None, say=lambda *_: twenty_minutes)
    monkeypatch.setattr(speakers, "PipelineSpeaker", lambda *_: speaker)
    channel: Any = ScriptedChannel(
        ["open", 1, "One. Two.", {**_OPTIONS, "is_streamed": False}],
        ["open", 2, "One. Two.", {**_OPTIONS, "is_streamed": True}],
        *(["part", number] for number in (1, 2, 1, 2)),
    )
    speech_program.serve(channel, 1, {"folder": str(tmp_path), "device": "CPU", "properties": {}, "voices": {}})
    assert [channel.sent[number][0] for number in (4, 5, 6, 7)] == ["part", "part", "refused", "part"]
    name, message, _ = channel.sent[6][1]
    assert (name, channel.sent[7][1]["is_last"]) == ("InvalidField", True)
    assert "limit 30 minutes without streaming; use stream_format: audio" in message


def test_error_of_the_library_fails_one_text_and_recreates_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pipeline = Mock()
    pipeline.return_value.get_speaker_embedding_shape.return_value = ov.Shape([1, 512])
    pipeline.return_value.generate.side_effect = IndexError("map::at")
    monkeypatch.setattr(genai, "Text2SpeechPipeline", pipeline)
    speaker = PipelineSpeaker(str(tmp_path), "CPU", {}, {})
    with pytest.raises(ModelFailure, match="the model failed: map::at"):
        speaker.say("Fail.", "", "", 1.0)
    assert pipeline.call_count == 2


def test_window_of_a_closed_recording_is_refused_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(languages=("en",), window=48_000, check=lambda _: None)
    model.hear = lambda sound, *_, **__: WindowTranscript("said", len(sound), "en")
    monkeypatch.setattr(hearing, "SpeechRecognizer", lambda *_, **__: model)
    wanted = {"translates": False, "language": "", "prompt": "", "temperature": 0, "has_segments": False}
    opening = [wave_file(1.0), wanted | {"has_words": False}]
    channel: Any = ScriptedChannel(
        ["open", 1, *opening], ["open", 2, *opening], ["close", 1], ["part", 1], ["part", 2], ["close", 2]
    )
    serve(channel, 1, {"folder": "", "device": "CPU", "properties": {}, "has_word_timestamps": False})
    kinds = [channel.sent[number][0] for number in (1, 2, 3, 5, 6)]
    assert kinds == ["loaded", "accepted", "accepted", "refused", "part"]
    assert channel.sent[5][1][:2] == ["ModelFailure", "the request is closed"]
