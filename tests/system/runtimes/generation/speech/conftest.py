"""Models of speech on disk, written once, and services of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from ovmstrio.core.generation import Task
from ovmstrio.runtimes.generation.speech.speech_model import SpeechModel
from ovmstrio.runtimes.generation.speech.transcription_model import TranscriptionModel
from tests.support.served_text_models import server_of
from tests.support.tiny_speakers import write_tiny_piper, write_tiny_speecht5
from tests.support.tiny_whisper import write_tiny_whisper

ServeSpeech = Callable[..., AbstractAsyncContextManager[TranscriptionModel]]
ServeVoice = Callable[..., AbstractAsyncContextManager[SpeechModel]]


@pytest.fixture(scope="session")
def speech_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model."""
    return write_tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def serve_speech(speech_folder: Path) -> ServeSpeech:
    """Load the model while a block lasts, with settings."""
    return server_of(name="ears", path=speech_folder, task=Task.SPEECH_TO_TEXT)


@pytest.fixture(scope="session")
def speecht5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of openvino-genai's that speaks."""
    return write_tiny_speecht5(tmp_path_factory.mktemp("speecht5"))


@pytest.fixture
def serve_speecht5(speecht5_folder: Path) -> ServeVoice:
    """Load that model while a block lasts, with settings."""
    return server_of(name="t5", path=speecht5_folder, task=Task.TEXT_TO_SPEECH)


@pytest.fixture
def serve_voice(tmp_path: Path) -> ServeVoice:
    """Load a voice of Piper's while a block lasts, with settings."""
    return server_of(name="voice", path=write_tiny_piper(tmp_path / "voice"), task=Task.TEXT_TO_SPEECH)
