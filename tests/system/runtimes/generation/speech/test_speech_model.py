"""A model that speaks in a process of its own: whose voice, in whose turn, and what ends it."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio

from ovmstrio.core.errors import ConfigError, InvalidField, ModelFailure, Overloaded
from ovmstrio.core.speech import SoundForm, SpeechPart, SpeechRequest
from ovmstrio.runtimes.generation.speech.speech_model import SpeechModel
from tests.support.tiny_speakers import (
    PIPER_RATE,
    T5_RATE,
    T5_SAMPLES,
    heard_letters,
    write_tiny_kokoro,
    write_tiny_piper,
    write_voice,
)
from tests.system.runtimes.generation.speech.conftest import ServeVoice

BOOK = "One more. " * 2000


async def spoken(model: SpeechModel, asked: SpeechRequest) -> list[SpeechPart]:
    """Have a text spoken."""
    async with model.speak(asked) as speech:
        return [part async for part in speech]


async def sound(model: SpeechModel, text: str, **how: Any) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    """Give the samples of a spoken text, and how many are a second."""
    parts = await spoken(model, SpeechRequest(text, **how))
    samples, rate = soundfile.read(io.BytesIO(b"".join(part.audio for part in parts)), dtype="float32")
    assert sum(part.seconds for part in parts) == pytest.approx(len(samples) / rate)
    return samples, rate


async def test_the_librarys_model_speaks_by_voices_of_its_folder_and_its_settings(
    serve_speecht5: ServeVoice, tmp_path: Path
) -> None:
    """A text of two sentences is one file, and who names no voice hears the library's own."""
    voices = {"soft": write_voice(tmp_path / "soft.bin", 0.125)}
    async with serve_speecht5(voices=voices) as model:
        loud, rate = await sound(model, "Hello you. Bye.", voice="loud")
        soft, _ = await sound(model, "Hello you. Bye.", voice="soft")
        own, _ = await sound(model, "Hello")

    assert (len(loud), rate) == (len("Hello you.Bye.") * T5_SAMPLES, T5_RATE)
    assert (set(loud.tolist()), set(soft.tolist())) == ({0.75}, {0.125})
    assert len(set(own.tolist())) == 1
    assert abs(own[0]) not in {0.0, 0.75, 0.125}


async def test_what_the_model_cannot_speak_is_refused_and_it_goes_on(serve_speecht5: ServeVoice) -> None:
    """With OVMS's words for a voice and a speed that it has not."""
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"voice": "anna"}, "voice", r"Requested voice 'anna' not found in available voices; there are: loud"),
        ({"speed": 0.2}, "speed", r"speed must be between speed_min \(0\.5\) and speed_max \(4\); got 0\.2"),
        ({"speed": 2.0}, "speed", "this model speaks at its own speed; got 2"),
        ({"text": "... !"}, "input", "input has nothing that could be spoken"),
    ]
    async with serve_speecht5(speed_min=0.5) as model:
        pid = model.pid
        for fields, field, said in refusals:
            asked: Any = {"text": "Hello", **fields}
            with pytest.raises(InvalidField, match=said) as caught:
                await spoken(model, SpeechRequest(**asked))
            assert caught.value.field == field
        assert len((await sound(model, "Hello", voice="loud"))[0]) == 5 * T5_SAMPLES
        assert (model.pid, model.open_requests) == (pid, 0)


async def test_kokoro_speaks_by_its_first_voice_in_languages_that_it_has(
    serve_voice: ServeVoice, tmp_path: Path
) -> None:
    """Words of its dictionary, as fast as it is asked to."""
    folder = write_tiny_kokoro(tmp_path / "kokoro")
    async with serve_voice(path=folder) as model:
        slow, rate = await sound(model, "hello")
        fast, _ = await sound(model, "hello", voice="anna", language="EN-GB", speed=2.0)
        with pytest.raises(InvalidField, match=r"language should be one of en-us, .*; got 'de'"):
            await spoken(model, SpeechRequest("hello", language="de"))

    assert rate == 24_000
    assert len(slow) == 2 * len(fast) > 0


async def test_a_voice_of_piper_speaks_letter_by_letter(serve_voice: ServeVoice) -> None:
    """As fast as it is asked to, under each of its names, whatever the file."""
    async with serve_voice() as model:
        once, rate = await sound(model, "Fail again. Fail better!")
        fast, _ = await sound(model, "Fail", voice="dora", speed=2.0, language="en_US")
        flac, _ = await sound(model, "Fail", voice="tiny", form=SoundForm.FLAC)
        with pytest.raises(InvalidField, match="this voice speaks en-us; got 'de'"):
            await spoken(model, SpeechRequest("Fehler", language="de"))
        with pytest.raises(InvalidField, match="there are: tiny, dora"):
            await spoken(model, SpeechRequest("Fail", voice="joe"))

    assert rate == PIPER_RATE
    assert heard_letters(once) == "Fail again.Fail better!"
    assert heard_letters(fast, length=0.5) == "Fail"
    assert heard_letters(flac) == "Fail"


async def test_speakers_of_one_network_are_voices(serve_voice: ServeVoice, tmp_path: Path) -> None:
    """By their names; the first one speaks for who names none."""
    folder = write_tiny_piper(tmp_path / "two", speakers={"ann": 0, "bob": 1})
    async with serve_voice(path=folder) as model:
        heard = [heard_letters((await sound(model, "abc", voice=voice))[0]) for voice in ("", "ann", "bob")]

    assert heard == ["abc", "abc", "bcd"]


async def stall(model: SpeechModel, *, task_status: trio.TaskStatus[None]) -> None:
    """Have a book spoken, of which nobody takes more than the first sentence."""
    async with model.speak(SpeechRequest(BOOK, form=SoundForm.PCM, is_streamed=True)) as speech:
        assert (await anext(aiter(speech))).audio
        task_status.started()
        await trio.sleep_forever()


async def test_no_more_texts_wait_than_may(serve_voice: ServeVoice) -> None:
    """Not even behind those that nobody reads; when they leave there is room again."""
    async with serve_voice(max_queue=1) as model:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                await nursery.start(stall, model)
            with pytest.raises(Overloaded, match="5 texts are being spoken or wait"):
                await spoken(model, SpeechRequest("One too many."))
            nursery.cancel_scope.cancel()
        assert heard_letters((await sound(model, "Fail better."))[0]) == "Fail better."


async def test_a_stream_has_a_part_a_sentence_and_no_more_than_its_client_takes(serve_voice: ServeVoice) -> None:
    """Who does not read holds up neither the process nor others, however many they are."""
    async with serve_voice() as model, trio.open_nursery() as nursery:
        for _ in range(6):
            await nursery.start(stall, model)
        assert heard_letters((await sound(model, "Fail better."))[0]) == "Fail better."
        assert model.open_requests == 6
        nursery.cancel_scope.cancel()


async def test_texts_take_turns_and_leave_with_their_clients(serve_voice: ServeVoice) -> None:
    """A sentence does not wait for the end of a book, which ends with its client."""
    heard: list[str] = []

    async def say(model: SpeechModel) -> None:
        heard.append(heard_letters((await sound(model, "Next."))[0]))

    async with serve_voice() as model:
        pid = model.pid
        book = SpeechRequest(BOOK, form=SoundForm.PCM, is_streamed=True)
        async with trio.open_nursery() as nursery, model.speak(book) as speech:
            for _ in range(4):
                nursery.start_soon(say, model)
            async for _ in speech:
                if len(heard) == 4:
                    break
            assert not speech.is_over
        for _ in range(8):
            with trio.CancelScope() as scope:
                async with model.speak(book) as speech:
                    async for _ in speech:
                        scope.cancel()
        assert heard == ["Next."] * 4
        assert (model.open_requests, model.pid) == (0, pid)
        assert heard_letters((await sound(model, "Fail better."))[0]) == "Fail better."


async def _kill_midway(model: SpeechModel) -> None:
    async with model.speak(SpeechRequest(BOOK, form=SoundForm.PCM, is_streamed=True)) as speech:
        async for _ in speech:
            if model.pid is not None:
                os.kill(model.pid, signal.SIGKILL)


async def test_a_process_that_is_killed_or_sleeps_is_there_again_for_who_asks(serve_voice: ServeVoice) -> None:
    """Texts of a killed one fail with the reason; one that nobody asks has given its memory back."""
    async with serve_voice(idle_unload_seconds=0.2) as model:
        assert heard_letters((await sound(model, "One."))[0]) == "One."
        while model.pid is not None:  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.05)
        assert model.obstacle == ""
        with pytest.raises(ModelFailure, match="SIGKILL"):
            await _kill_midway(model)
        while model.obstacle:  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.05)
        assert heard_letters((await sound(model, "Two."))[0]) == "Two."


async def test_a_folder_without_such_a_model_is_refused_with_what_is_missing(
    serve_voice: ServeVoice, speecht5_folder: Path, tmp_path: Path
) -> None:
    """Before a process is started; what one finds is told by it."""
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
    for settings, error, said in (
        ({"path": tmp_path / "nowhere"}, ConfigError, "nowhere, which does not exist"),
        ({"path": tmp_path}, ConfigError, r"without config\.json, openvino_decoder_model\.xml"),
        ({"path": lone}, ConfigError, r"without a\.onnx\.json"),
        ({"path": speecht5_folder, "voices": {"anna": absent}}, ConfigError, r"file does not exist.*none\.bin"),
        ({"voices": {"anna": short}}, ConfigError, "a voice of Piper speaks with the speakers of its own file"),
        ({"path": several}, ModelFailure, r"several voices of Piper, other\.onnx, tiny\.onnx: give each a folder"),
        ({"path": folder}, ModelFailure, "voices whose phoneme_type is 'pinyin' are not served"),
        ({"path": kokoro, "voices": {"s": short}}, ModelFailure, r"with 130560 32-bit floats\. Got: 5"),
    ):
        with pytest.raises(error, match=said):
            async with serve_voice(**settings):
                pytest.fail("it was loaded")
