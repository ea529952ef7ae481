"""Models of speech on disk, written once, and services of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from ovmstrio.core.generation import Task
from ovmstrio.runtimes.generation.speech.transcription_model import TranscriptionModel
from tests.support.served_text_models import server_of
from tests.support.tiny_whisper import write_tiny_whisper

ServeSpeech = Callable[..., AbstractAsyncContextManager[TranscriptionModel]]


@pytest.fixture(scope="session")
def speech_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model."""
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def serve_speech(speech_folder: Path) -> ServeSpeech:
    """Load the model while a block lasts, with settings."""
    return server_of(name="ears", path=speech_folder, task=Task.SPEECH_TO_TEXT)
