"""Main loop of an engine process: receive all pending messages, run a step, send its output in one frame.

::

    first                                       ["loaded", facts] or ["failed", reason]
    ["add", id, request]                        ["accepted", prompt tokens] or ["refused", error]
    ["tokenize", id, texts, options]            ["tokens", tokens, counts] or ["refused", error]
    ["cancel", id]                              not answered; a request that it ends unanswered is refused
    number 0, each step                         [rows, failures, figures]; see :meth:`Engine.step`
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.inference.engine.engine import Engine, Limits, TokenizeQueue
from ovmstrio.inference.engine.grammar_precompile import GrammarCompiler
from ovmstrio.inference.engine.messages import CANCELLED, FAILED, LOADED, REJECTED, encode_failure
from ovmstrio.inference.engine.pipeline import Pipeline, PipelineOptions, library_error_message
from ovmstrio.inference.engine.prompts import PromptTokenizer, choose_renderer, context_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.isolation.blocking_channel import BlockingChannel
    from ovmstrio.isolation.messages import Message

_CANCEL: Final = "cancel"
_UNSOLICITED: Final = 0  # number of messages that are no answer, or need none
_RECEIVE_SECONDS: Final = 0.05  # time limit for receiving messages between two steps


class EngineProgram:
    """Serves one channel."""

    def __init__(self, channel: BlockingChannel, engine: Engine, tokenizing: TokenizeQueue) -> None:
        self._channel = channel
        self._engine = engine
        self._tokenizing = tokenizing
        self._pending: deque[Message | None] = deque()
        self._cancelled: set[int] = set()

    def run(self) -> None:
        """Serve until the server closes its side."""
        while self._take_messages():
            if self._engine.is_busy:
                self._channel.send([_UNSOLICITED, self._engine.step()])
            self._tokenizing.go_on()

    @property
    def _is_busy(self) -> bool:
        return self._engine.is_busy or self._tokenizing.is_busy

    def _take_messages(self) -> bool:
        started = time.monotonic()
        while True:
            self._read_ahead()
            if not self._pending:
                if self._is_busy:
                    return True
                self._channel.wait(self._engine.descriptors, self._engine.seconds_left)
                continue
            message = self._pending.popleft()
            if message is None:
                return False
            self._take(*message.value)
            if self._is_busy and time.monotonic() - started > _RECEIVE_SECONDS:
                return True

    def _read_ahead(self) -> None:
        """Receive pending messages, so that requests cancelled among them cause no work."""
        while not (self._pending and self._pending[-1] is None) and self._channel.has_message():
            message = self._channel.receive()
            self._pending.append(message)
            if message is not None and message.value[1][0] == _CANCEL:
                self._cancelled.add(message.value[1][1])

    def _take(self, number: int, value: list[Any]) -> None:
        kind, request, *parts = value
        if kind == _CANCEL:
            self._cancelled.discard(request)
            self._tokenizing.cancel(request)
            self._engine.cancel(request)
        elif request in self._cancelled:
            self._channel.send([number, [REJECTED, encode_failure(CANCELLED)]])
        elif kind == "tokenize":
            self._tokenizing.add(number, request, *parts)
        else:
            self._engine.add(number, request, *parts)


def _load(options: dict[str, Any], answer: Callable[[int, Any], None]) -> tuple[Engine, TokenizeQueue, dict[str, Any]]:
    pipeline = Pipeline(PipelineOptions(**options["pipeline"]))
    folder = Path(options["pipeline"]["folder"])
    room = pipeline.blocks * pipeline.block_tokens
    context = context_length(folder)
    limits = Limits(min(room, context or room), **options["limits"])
    renderer = choose_renderer(pipeline.tokenizer, folder, options["template_mode"])
    prompts = PromptTokenizer(pipeline.tokenizer, renderer.render, limits.tokens)
    engine = Engine(
        pipeline,
        prompts,
        limits,
        answer,
        GrammarCompiler(pipeline, folder),
        templates=renderer.process,
        caches_prefixes=options["pipeline"]["caches_prefixes"],
    )
    facts = {
        "context_length": limits.tokens,
        "vocabulary_size": prompts.vocabulary_size,
        "longest_token": prompts.longest_token,
        "blocks": pipeline.blocks,
        "block_tokens": pipeline.block_tokens,
        "chat_template": renderer.source,
    }
    return engine, TokenizeQueue(prompts.tokenize_all, answer), facts


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Run an engine for the model named in the first message."""

    def answer(message: int, value: Any) -> None:
        if message != _UNSOLICITED:
            channel.send([message, value])

    try:
        engine, tokenizing, facts = _load(options, answer)
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
        return
    channel.send([number, [LOADED, facts]])
    EngineProgram(channel, engine, tokenizing).run()
