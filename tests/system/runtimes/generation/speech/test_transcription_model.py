"""A model of speech in a process of its own: what it writes down, in whose turn, and what ends it."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from ovmstrio.core.errors import ConfigError, InvalidField, ModelFailure, Overloaded
from ovmstrio.core.speech import TranscriptionRequest, TranscriptPart
from ovmstrio.runtimes.generation.speech.transcription_model import TranscriptionModel
from tests.support.recordings import wave_file
from tests.support.tiny_whisper import LANGUAGE, SAID, SEGMENT, TRANSLATED
from tests.system.runtimes.generation.speech.conftest import ServeSpeech

SHORT = wave_file(2.0)
LONG = wave_file(7.0)
HOUR = wave_file(3600.0, 8000)
"""More windows than a test could wait for."""


@dataclass
class Heard:
    """All that has come of a recording."""

    parts: list[TranscriptPart] = field(default_factory=list)
    language: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(part.text for part in self.parts)

    @property
    def times(self) -> list[tuple[float, float]]:
        """When the segments were."""
        return [(span.start, span.end) for part in self.parts for span in part.segments]


async def heard(model: TranscriptionModel, asked: TranscriptionRequest) -> Heard:
    """Have a recording written down."""
    found = Heard()
    async with model.transcribe(asked) as transcript:
        async for part in transcript:
            found.parts.append(part)
        found.language, found.seconds = transcript.language, transcript.seconds
    return found


async def test_recordings_are_written_down_as_they_are_asked_for(serve_speech: ServeSpeech) -> None:
    """Short ones letter by letter, long ones window by window, each from the end of the last segment."""
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


async def test_what_cannot_be_written_down_is_refused_and_nobody_else_notices(serve_speech: ServeSpeech) -> None:
    """The process goes on, with whatever it was at."""
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


async def test_words_have_times_where_the_model_was_loaded_for_them(serve_speech: ServeSpeech) -> None:
    """They are those of the segments, in their order."""
    async with serve_speech(enable_word_timestamps=True) as model:
        found = await heard(model, TranscriptionRequest(LONG, wants_words=True))
        again = await heard(model, TranscriptionRequest(SHORT))

    words = [word for part in found.parts for word in part.words]
    assert "".join(word.text for word in words) == SEGMENT * 4
    assert [word.start for word in words] == sorted(word.start for word in words)
    assert all(word.start <= word.end <= found.seconds for word in words)
    assert again.text == SAID


async def test_recordings_take_turns_in_a_bounded_queue_and_leave_with_their_clients(serve_speech: ServeSpeech) -> None:
    """Short ones do not wait for the end of one of an hour, which goes on afterwards until its client leaves."""
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


async def _kill_midway(model: TranscriptionModel) -> None:
    async with model.transcribe(TranscriptionRequest(HOUR)) as hour:
        async for _ in hour:
            if model.pid is not None:
                os.kill(model.pid, signal.SIGKILL)


async def test_a_process_that_is_killed_or_sleeps_is_there_again_for_who_asks(serve_speech: ServeSpeech) -> None:
    """Recordings of a killed one fail with the reason; one that nobody asks has given its memory back."""
    async with serve_speech(idle_unload_seconds=0.2) as model:
        assert (await heard(model, TranscriptionRequest(SHORT))).text == SAID
        while model.pid is not None:  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.05)
        assert model.obstacle == ""
        with pytest.raises(ModelFailure, match="SIGKILL"):
            await _kill_midway(model)
        assert "SIGKILL" in model.obstacle
        while model.obstacle:  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.05)
        assert (await heard(model, TranscriptionRequest(SHORT))).text == SAID


async def test_a_folder_without_such_a_model_is_refused_with_what_is_missing(
    serve_speech: ServeSpeech, tmp_path: Path
) -> None:
    """Before a process is started."""
    (tmp_path / "openvino_encoder_model.xml").touch()
    with pytest.raises(ConfigError, match=r"without openvino_decoder_model\.xml, openvino_tokenizer\.xml"):
        async with serve_speech(path=tmp_path):
            pytest.fail("it was loaded")
