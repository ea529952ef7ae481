"""A REST front end with scripted services behind OpenAI's API, and helpers for bodies and events."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import trio

from ovmstrio.config.specs import TextModelSpec
from ovmstrio.core.generation import Task
from tests.support.scripted_services import (
    LetterEncoder,
    ScriptedGenerator,
    ScriptedImageGenerator,
    ScriptedSpeaker,
    ScriptedTranscriber,
    text_spec,
)
from tests.support.stub_registry import load_pass_through
from tests.support.waits import WAIT_SECONDS
from tests.unit.protocols.servers import Serving, serving_rest

CHAT, WORDS, VOICE, EARS, BRUSH = "chat", "words", "voice", "ears", "brush"
PREFIXES: Final = ("/v3", "/v1", "/v3/v1")
_SERVICES: Final[dict[str, Any]] = {
    CHAT: (ScriptedGenerator, Task.TEXT_GENERATION),
    WORDS: (LetterEncoder, Task.EMBEDDINGS),
    VOICE: (ScriptedSpeaker, Task.TEXT_TO_SPEECH),
    EARS: (ScriptedTranscriber, Task.SPEECH_TO_TEXT),
    BRUSH: (ScriptedImageGenerator, Task.IMAGE_GENERATION),
}


async def _load(spec: Any, version: int, directory: Path) -> Any:
    if not isinstance(spec, TextModelSpec):
        return await load_pass_through(spec, version, directory)
    await trio.lowlevel.checkpoint()
    return _SERVICES[spec.name][0](spec.name)


def serve_openai(folder: Path, **options: Any) -> AbstractAsyncContextManager[Serving]:
    """Serve a scripted service per task, and the model ``echo``; ``options`` are those of :func:`serving_rest`."""
    models: Any = tuple(
        text_spec(folder / name, name).model_copy(update={"task": task}) for name, (_, task) in _SERVICES.items()
    )
    return serving_rest(folder, models=models, loader=_load, **options)


def service_of(serving: Serving, name: str = CHAT) -> Any:
    service: Any = serving.registry.peek(name)
    assert isinstance(service, _SERVICES[name][0])
    return service


def chat_body(text: Any = "one two", **more: Any) -> dict[str, Any]:
    return {"model": CHAT, "messages": [{"role": "user", "content": text}], **more}


def events_of(text: str) -> list[Any]:
    """Parse the data of server-sent events; the last one of a chat is ``"[DONE]"``."""
    found = []
    for block in text.split("\n\n")[:-1]:
        data = block.rpartition("data: ")[2]
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def expect_cancelled_on_disconnect(serving: Serving, name: str, request: bytes) -> None:
    """Send a request, disconnect while its service waits, and check that the call ends and counts as cancelled."""
    service = service_of(serving, name)
    with trio.fail_after(WAIT_SECONDS):
        async with serving.connect() as peer:
            await peer.send(request)
            await service.waiting.wait()
        await service.left.wait()
    await serving.wait_closed()
    assert service.running == 0
    (line,) = [each for each in (await serving.get("/metrics")).text.splitlines() if 'code="Cancelled"' in each]
    assert line.startswith("ovmstrio_requests_total{")
    assert line.endswith(" 1.0")


def post_of(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
