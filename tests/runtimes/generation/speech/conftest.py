"""A model of speech on disk, written once, and services of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.config.text_models import TextModelSpec
from ovmstrio.core.errors import ServerError
from ovmstrio.core.generation import Task
from ovmstrio.runtimes.generation.speech.transcription_model import TranscriptionModel, load_transcription_model
from ovmstrio.runtimes.kind import LoadContext, lease_nothing
from tests.support.tiny_whisper import write_tiny_whisper

ServeSpeech = Callable[..., AbstractAsyncContextManager[TranscriptionModel]]


@pytest.fixture(scope="session")
def speech_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model."""
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def serve_speech(speech_folder: Path) -> ServeSpeech:
    """Load the model while a block lasts, with settings."""

    @asynccontextmanager
    async def serve(**settings: Any) -> AsyncIterator[TranscriptionModel]:
        given = {"name": "ears", "base_path": speech_folder, "path": speech_folder, "task": Task.SPEECH_TO_TEXT}
        spec = TextModelSpec(**{**given, **settings})
        failure = None
        with trio.fail_after(120):
            async with trio.open_nursery() as tasks:
                try:
                    model = await load_transcription_model(spec, LoadContext(lease_nothing, tasks))
                except ServerError as error:
                    failure = error
                else:
                    try:
                        yield model
                    finally:
                        await model.aclose()
        if failure is not None:
            raise failure

    return serve
