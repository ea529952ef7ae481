"""Samples' clients of models of text whose server goes away within an answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError

from ovmstrio_samples.chat.client import answer
from ovmstrio_samples.transcription.client import transcribe
from ovmstrio_samples.voice.client import speak
from tests.support.plain_http import QuietHandler, answering_http

_EVENTS = "text/event-stream"


class _BreaksOff(QuietHandler):
    """Begins to answer, and closes the connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        """Send the half of an answer."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "audio/wav" if self.path.endswith("speech") else _EVENTS)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"6\r\n: half\r\n")
        self.close_connection = True


@pytest.fixture(scope="module")
def breaking() -> Iterator[str]:
    """The address of a server that breaks its answers off."""
    with answering_http(_BreaksOff) as address:
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


def test_the_command_that_speaks_ends_with_a_sentence_and_no_traceback(breaking: str, tmp_path: Path) -> None:
    """What came of the recording stays."""
    file = tmp_path / "speech.wav"
    command = [sys.executable, "-m", "ovmstrio_samples.voice.client", "--url", breaking, "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the answer broke off")
    assert "Traceback" not in done.stderr
    assert file.read_bytes() == b": half"
