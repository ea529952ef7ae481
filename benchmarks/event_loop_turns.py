"""Longest turns of the event loop for oversized inputs: long errors, and prompts of 30 MB that are refused."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Final
from unittest import mock

import trio

from benchmarks.report import Row
from ovmstrio.protocols.openai.api import Body, OpenAIApi, model_name
from ovmstrio.util.truncation import format_error
from tests.support.scripted_services import CHAT, WORDS, load_encoder, text_spec
from tests.unit.protocols.servers import Serving, serving_rest

__all__ = ["run"]

_GOAL_MS: Final = 50.0
_ROUNDS: Final = 5
_MILLISECONDS: Final = 1e3
_CHARACTERS: Final = 30_000_000
_TEXTS: Final = {"words": "the cat ", "non-ASCII": "\u4e2d", "newlines": "\n", "controls": "\x01"}
_PAUSE_SECONDS: Final = 0.0005


def run() -> list[Row]:
    """Measure the formatting of errors and the refusal of prompts."""
    return [*_errors(), *trio.run(_refusals)]


def _errors() -> list[Row]:
    text = "x" * 20_000_000
    errors = {
        "a text of 20 MB": _chained(1, text),
        "a chain of 1,000": _chained(1000, ""),
        "a chain of 1,000 with 20 KB each": _chained(1000, text[:20_000]),
    }
    return [
        _row(f"format an error: {name}", min(_formatting_ms(error) for _ in range(_ROUNDS)), "")
        for name, error in errors.items()
    ]


def _chained(count: int, text: str) -> Exception:
    """Create an exception with ``count`` - 1 causes."""
    error: Exception | None = None
    for number in range(count):
        error, cause = RuntimeError(f"{number} {text}"), error
        error.__cause__ = cause
    assert error is not None
    return error


def _formatting_ms(error: Exception) -> float:
    begin = time.thread_time()
    format_error(error)
    return (time.thread_time() - begin) * _MILLISECONDS


async def _refusals() -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models: Any = (text_spec(folder / "words", WORDS), text_spec(folder / "chat"))
        async with serving_rest(folder, models=models, loader=load_encoder) as server:
            for kind, unit in _TEXTS.items():
                text = unit * (_CHARACTERS // len(unit))
                rows += [
                    _row(
                        f"refuse a prompt of 30 million characters, {kind}", await _refusal_ms(server, path, body), path
                    )
                    for path, body in (
                        ("/v3/chat/completions", {"model": CHAT, "messages": [{"role": "user", "content": text}]}),
                        ("/v3/completions", {"model": CHAT, "prompt": text}),
                        ("/v3/responses", {"model": CHAT, "input": text}),
                        ("/v3/tokenize", {"model": WORDS, "text": text}),
                    )
                ]
    return rows


async def _refusal_ms(server: Serving, path: str, document: dict[str, Any]) -> float:
    """Return the longest turn of the loop for a request whose body is already parsed."""
    longest = 0.0

    async def parsed(_: OpenAIApi, request: Any) -> Body:
        del request
        await trio.lowlevel.checkpoint()
        return Body(document, model_name(document), 6 * _CHARACTERS)

    async def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while True:
            await trio.sleep(_PAUSE_SECONDS)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    with mock.patch.object(OpenAIApi, "body", parsed):
        async with trio.open_nursery() as nursery, server.connect() as peer:
            nursery.start_soon(watch)
            await trio.sleep(4 * _PAUSE_SECONDS)
            answer = await peer.ask(f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx".encode())
            assert answer.status == 400, answer.body[:500]
            await trio.sleep(4 * _PAUSE_SECONDS)
            nursery.cancel_scope.cancel()
    return longest * _MILLISECONDS


def _row(what: str, milliseconds: float, detail: str) -> Row:
    return Row(f"{what}; ms of the event loop", milliseconds, f"<= {_GOAL_MS:.0f}", milliseconds <= _GOAL_MS, detail)
