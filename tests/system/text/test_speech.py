from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio

from ovmstrio.core.errors import ConfigError, InvalidField, ModelFailure, Overloaded
from ovmstrio.core.generation import Task
from ovmstrio.core.speech import AudioFormat, SpeechPart, SpeechRequest, TranscriptionRequest, TranscriptPart
from ovmstrio.text.speech import SpeechModel
from ovmstrio.text.transcription import TranscriptionModel
from tests.support.recordings import wave_file
from tests.support.served_text_models import server_of
from tests.support.tiny_speech_models import (
    PIPER_RATE,
    T5_RATE,
    T5_SAMPLES,
    heard_letters,
    write_tiny_kokoro,
    write_tiny_piper,
    write_tiny_speecht5,
    write_voice,
)
from tests.support.tiny_whisper import LANGUAGE, SAID, SEGMENT, TRANSLATED, write_tiny_whisper
from tests.support.waits import until_async

BOOK = "One more. " * 2000


ServeSpeech = Callable[..., AbstractAsyncContextManager[TranscriptionModel]]
ServeVoice = Callable[..., AbstractAsyncContextManager[SpeechModel]]


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def serve_speech(whisper_folder: Path) -> ServeSpeech:
    """Return a function that serves a Whisper model with settings while a block lasts."""
    return server_of(name="ears", path=whisper_folder, task=Task.SPEECH_TO_TEXT)


@pytest.fixture(scope="module")
def speecht5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_speecht5(tmp_path_factory.mktemp("speecht5"))


@pytest.fixture
def serve_speecht5(speecht5_folder: Path) -> ServeVoice:
    return server_of(name="t5", path=speecht5_folder, task=Task.TEXT_TO_SPEECH)


@pytest.fixture
def serve_voice(tmp_path: Path) -> ServeVoice:
    """Return a function that serves a voice of Piper with settings while a block lasts."""
    return server_of(name="voice", path=write_tiny_piper(tmp_path / "voice"), task=Task.TEXT_TO_SPEECH)


async def spoken(model: SpeechModel, request: SpeechRequest) -> list[SpeechPart]:
    async with model.speak(request) as speech:
        return [part async for part in speech]


async def sound(model: SpeechModel, text: str, **options: Any) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    parts = await spoken(model, SpeechRequest(text, **options))
    samples, rate = soundfile.read(io.BytesIO(b"".join(part.audio for part in parts)), dtype="float32")
    assert sum(part.seconds for part in parts) == pytest.approx(len(samples) / rate)
    return samples, rate


async def spoken_letters(model: SpeechModel, text: str, **options: Any) -> str:
    return heard_letters((await sound(model, text, **options))[0])


async def test_speecht5_speaks_with_voices_of_its_folder_and_settings(
    serve_speecht5: ServeVoice, tmp_path: Path
) -> None:
    voices = {"soft": write_voice(tmp_path / "soft.bin", 0.125)}
    async with serve_speecht5(voices=voices) as model:
        loud, rate = await sound(model, "Hello you. Bye.", voice="loud")
        soft, _ = await sound(model, "Hello you. Bye.", voice="soft")
        own, _ = await sound(model, "Hello")
    assert (len(loud), rate) == (len("Hello you.Bye.") * T5_SAMPLES, T5_RATE)
    assert (set(loud.tolist()), set(soft.tolist())) == ({0.75}, {0.125})
    assert len(set(own.tolist())) == 1
    assert abs(own[0]) not in {0.0, 0.75, 0.125}


async def test_invalid_requests_are_refused_and_the_process_continues(serve_speecht5: ServeVoice) -> None:
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"voice": "anna"}, "voice", r"Requested voice 'anna' not found in available voices; there are: loud"),
        ({"speed": 0.2}, "speed", r"speed must be between speed_min \(0\.5\) and speed_max \(4\); got 0\.2"),
        ({"speed": 2.0}, "speed", "this model has a fixed speed; got 2"),
        ({"text": "... !"}, "input", "input has nothing speakable"),
    ]
    async with serve_speecht5(speed_min=0.5) as model:
        pid = model.pid
        for fields, field, message in refusals:
            asked: Any = {"text": "Hello", **fields}
            with pytest.raises(InvalidField, match=message) as caught:
                await spoken(model, SpeechRequest(**asked))
            assert caught.value.field == field
        assert len((await sound(model, "Hello", voice="loud"))[0]) == 5 * T5_SAMPLES
        assert (model.pid, model.open_requests) == (pid, 0)


async def test_kokoro_speaks_with_its_first_voice_in_its_languages(serve_voice: ServeVoice, tmp_path: Path) -> None:
    folder = write_tiny_kokoro(tmp_path / "kokoro")
    async with serve_voice(path=folder) as model:
        slow, rate = await sound(model, "hello")
        fast, _ = await sound(model, "hello", voice="anna", language="EN-GB", speed=2.0)
        with pytest.raises(InvalidField, match=r"language should be one of en-us, .*; got 'de'"):
            await spoken(model, SpeechRequest("hello", language="de"))
    assert rate == 24_000
    assert len(slow) == 2 * len(fast) > 0


async def test_piper_voice_speaks_at_any_speed_in_any_format(serve_voice: ServeVoice) -> None:
    async with serve_voice() as model:
        once, rate = await sound(model, "Fail again. Fail better!")
        fast, _ = await sound(model, "Fail", voice="dora", speed=2.0, language="en_US")
        flac, _ = await sound(model, "Fail", voice="tiny", form=AudioFormat.FLAC)
        with pytest.raises(InvalidField, match="this voice supports en-us only; got 'de'"):
            await spoken(model, SpeechRequest("Fehler", language="de"))
        with pytest.raises(InvalidField, match="there are: tiny, dora"):
            await spoken(model, SpeechRequest("Fail", voice="joe"))
    assert rate == PIPER_RATE
    assert heard_letters(once) == "Fail again.Fail better!"
    assert heard_letters(fast, length=0.5) == "Fail"
    assert heard_letters(flac) == "Fail"


async def test_speakers_of_one_network_are_voices(serve_voice: ServeVoice, tmp_path: Path) -> None:
    folder = write_tiny_piper(tmp_path / "two", speakers={"ann": 0, "bob": 1})
    async with serve_voice(path=folder) as model:
        heard = [await spoken_letters(model, "abc", voice=voice) for voice in ("", "ann", "bob")]
    assert heard == ["abc", "abc", "bcd"]


async def stall(model: SpeechModel, *, task_status: trio.TaskStatus[None]) -> None:
    async with model.speak(SpeechRequest(BOOK, form=AudioFormat.PCM, is_streamed=True)) as speech:
        assert (await anext(aiter(speech))).audio
        task_status.started()
        await trio.sleep_forever()


async def test_unread_streams_block_no_other_text_until_the_queue_is_full(serve_voice: ServeVoice) -> None:
    async with serve_voice(max_queue=1) as model:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                await nursery.start(stall, model)
            assert await spoken_letters(model, "Fail better.") == "Fail better."
            assert model.open_requests == 4
            await nursery.start(stall, model)
            with pytest.raises(Overloaded, match="5 texts are being spoken or wait"):
                await spoken(model, SpeechRequest("One too many."))
            nursery.cancel_scope.cancel()
        assert await spoken_letters(model, "Fail better.") == "Fail better."


async def _kill_midway(model: SpeechModel) -> None:
    async with model.speak(SpeechRequest(BOOK, form=AudioFormat.PCM, is_streamed=True)) as speech:
        async for _ in speech:
            if model.pid is not None:
                os.kill(model.pid, signal.SIGKILL)


async def test_killed_and_idle_processes_are_restarted_by_requests(serve_voice: ServeVoice) -> None:
    async with serve_voice(idle_unload_seconds=0.2) as model:
        assert await spoken_letters(model, "One.") == "One."
        await until_async(lambda: model.pid is None)
        assert model.unready_reason == ""
        with pytest.raises(ModelFailure, match="SIGKILL"):
            await _kill_midway(model)
        await until_async(lambda: not model.unready_reason)
        assert await spoken_letters(model, "Two.") == "Two."


async def test_folder_without_a_model_is_refused(
    serve_voice: ServeVoice, serve_speech: ServeSpeech, speecht5_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "openvino_encoder_model.xml").touch()
    absent = tmp_path / "none.bin"
    short = write_voice(tmp_path / "short.bin", 1.0, (5,))
    folder = write_tiny_piper(tmp_path / "pinyin", phoneme_type="pinyin")
    kokoro = write_tiny_kokoro(tmp_path / "kokoro")
    several = write_tiny_piper(tmp_path / "several")
    for name in ("other.onnx", "other.onnx.json"):
        (several / name).touch()
    lone = tmp_path / "lone"
    lone.mkdir()
    (lone / "a.onnx").touch()
    with pytest.raises(ConfigError, match=r"without openvino_decoder_model\.xml, openvino_tokenizer\.xml"):
        async with serve_speech(path=tmp_path):
            pytest.fail("the model was loaded")
    for settings, error, message in (
        ({"path": tmp_path / "nowhere"}, ConfigError, "nowhere, which does not exist"),
        ({"path": tmp_path}, ConfigError, r"without config\.json, openvino_decoder_model\.xml"),
        ({"path": lone}, ConfigError, r"without a\.onnx\.json"),
        ({"path": speecht5_folder, "voices": {"anna": absent}}, ConfigError, r"file does not exist.*none\.bin"),
        ({"voices": {"anna": short}}, ConfigError, "Piper models take no voices"),
        ({"path": several}, ModelFailure, r"several Piper voices, other\.onnx, tiny\.onnx: use one folder"),
        ({"path": folder}, ModelFailure, "phoneme_type 'pinyin' is not supported"),
        ({"path": kokoro, "voices": {"s": short}}, ModelFailure, r"with 130560 32-bit floats\. Got: 5"),
    ):
        with pytest.raises(error, match=message):
            async with serve_voice(**settings):
                pytest.fail("the model was loaded")


SHORT = wave_file(2.0)
LONG = wave_file(7.0)
HOUR = wave_file(3600.0, 8000)  # has more windows than a test could wait for


@dataclass
class _Heard:
    parts: list[TranscriptPart] = field(default_factory=list)
    language: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def times(self) -> list[tuple[float, float]]:
        return [(span.start, span.end) for part in self.parts for span in part.segments]


async def heard(model: TranscriptionModel, request: TranscriptionRequest) -> _Heard:
    found = _Heard()
    async with model.transcribe(request) as transcript:
        async for part in transcript:
            found.parts.append(part)
        found.language, found.seconds = transcript.language, transcript.seconds
    return found


async def test_recordings_are_transcribed_and_translated(serve_speech: ServeSpeech) -> None:
    async with serve_speech() as model:
        short = await heard(model, TranscriptionRequest(SHORT))
        long = await heard(model, TranscriptionRequest(LONG, wants_segments=True))
        english = TranscriptionRequest(SHORT, translates=True, language="en", wants_segments=True)
        translated = await heard(model, english)
        prompted = await heard(model, TranscriptionRequest(SHORT, prompt="the barn " * 2000))
    assert (short.text, short.language, short.seconds, short.times) == (SAID, LANGUAGE, 2.0, [])
    assert len(short.parts) > 1
    assert long.text == SEGMENT * 4
    assert long.times == [(0, 1.5), (1.5, 3), (3, 4.5), (4.5, 6)]
    assert long.seconds == 7.0
    assert (translated.text, translated.language) == (TRANSLATED, "en")
    assert translated.times == [(0.02, 1.5)]
    assert prompted.text == SAID, "a prompt longer than the decoder is cut"


async def test_invalid_recordings_are_refused_and_disturb_no_other(serve_speech: ServeSpeech) -> None:
    async with serve_speech() as model, model.transcribe(TranscriptionRequest(SHORT)) as transcript:
        pid = model.pid
        with pytest.raises(InvalidField, match="not a valid audio file"):
            await heard(model, TranscriptionRequest(b"text"))
        with pytest.raises(InvalidField, match=r"Invalid language code\. Expected one of de, en; got 'xx'") as caught:
            await heard(model, TranscriptionRequest(SHORT, language="xx"))
        with pytest.raises(InvalidField, match="enable_word_timestamps"):
            await heard(model, TranscriptionRequest(SHORT, wants_words=True))
        assert "".join([part.text async for part in transcript]) == SAID
        assert (model.pid, model.open_requests) == (pid, 1)
    assert caught.value.field == "language"


async def test_recordings_take_turns_in_a_bounded_queue(serve_speech: ServeSpeech) -> None:
    done: list[str] = []

    async def hear(model: TranscriptionModel) -> None:
        done.append((await heard(model, TranscriptionRequest(SHORT))).text)

    async with serve_speech(max_queue=2) as model:
        pid = model.pid
        async with trio.open_nursery() as nursery, model.transcribe(TranscriptionRequest(HOUR)) as hour:
            for _ in range(5):
                nursery.start_soon(hear, model)
            while model.open_requests < 6:
                await trio.lowlevel.checkpoint()
            with pytest.raises(Overloaded, match="6 recordings are being written down or wait"):
                await heard(model, TranscriptionRequest(SHORT))
            async for part in hour:
                assert part.text == SEGMENT
                if len(done) == 5:
                    break
            assert not hour.is_over
        assert done == [SAID] * 5
        for _ in range(8):
            with trio.CancelScope() as scope:
                async with model.transcribe(TranscriptionRequest(HOUR)) as hour:
                    async for _ in hour:
                        scope.cancel()
        assert model.open_requests == 0
        assert (await heard(model, TranscriptionRequest(LONG))).text == SEGMENT * 4
        assert model.pid == pid
