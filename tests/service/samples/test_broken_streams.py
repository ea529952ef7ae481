"""Samples' clients of models of text whose server goes away within an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError

from ovmstrio_samples.chat.client import answer
from ovmstrio_samples.transcription.client import transcribe
from ovmstrio_samples.voice.client import speak
from tests.support.broken_answers import BreakingHandler
from tests.support.plain_http import answering_http


@pytest.fixture(scope="module")
def breaking() -> Iterator[str]:
    """The address of a server that breaks its answers off."""
    with answering_http(BreakingHandler) as address:
        yield address


@pytest.mark.parametrize("call", [partial(speak, text="Hello."), partial(answer, question="Who?"), transcribe])
def test_a_client_tells_of_an_answer_that_breaks_off_by_an_error_of_openai(
    call: Callable[..., Iterator[Any]], breaking: str, tmp_path: Path
) -> None:
    """Whoever catches what these document catches this, too."""
    recording = tmp_path / "said.wav"
    recording.write_bytes(b"RIFF")
    given = {"recording": recording} if call is transcribe else {}
    with pytest.raises(APIConnectionError):
        list(call(breaking, **given))
