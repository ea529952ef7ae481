"""The loop of an engine process: all messages that have come, then a step, then one frame with what it has brought.

::

    first                                       ["loaded", facts] or ["failed", reason]
    ["add", id, request]                        ["accepted", prompt tokens] or ["refused", error]
    ["tokenize", texts, options]                ["tokens", [[...], ...]] or ["refused", error]
    ["cancel", id]                              is not answered
    number 0, each step                         [rows, failures, figures]; see :meth:`Engine.step`
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.core.errors import ServerError
from ovmstrio.openvino.engine.chat import choose_renderer
from ovmstrio.openvino.engine.engine import Engine, Limits
from ovmstrio.openvino.engine.form_compiler import FormCompiler
from ovmstrio.openvino.engine.frames import FAILED, LOADED, REFUSED, TOKENS, encode_failure
from ovmstrio.openvino.engine.library_errors import reason_of
from ovmstrio.openvino.engine.pipeline import Pipeline, PipelineOptions
from ovmstrio.openvino.engine.prompts import Prompts, context_length

if TYPE_CHECKING:
    from ovmstrio.work.messages.blocking_channel import BlockingChannel

__all__ = ["EngineProgram", "serve"]

_TELL: Final = 0
"""The number of what nobody has asked for, or is not to be answered."""

_READS_SECONDS: Final = 0.05
"""How long messages are read before the texts that run get their next token."""


class EngineProgram:
    """Serves one channel.

    Args:
        channel: the server's.
        options: what is loaded, as the server says it.

    Attributes:
        facts: what is known of the model.

    Raises:
        RuntimeError: the model cannot be loaded.
    """

    def __init__(self, channel: BlockingChannel, options: dict[str, Any]) -> None:
        self._channel = channel
        pipeline = Pipeline(PipelineOptions(**options["pipeline"]))
        folder = Path(options["pipeline"]["folder"])
        room = pipeline.blocks * pipeline.block_tokens
        context = context_length(folder)
        limits = Limits(min(room, context or room), **options["limits"])
        render, source = choose_renderer(pipeline.tokenizer, folder, options["template_mode"])
        self._prompts = Prompts(pipeline.tokenizer, render, limits.tokens)
        self._engine = Engine(
            pipeline,
            self._prompts,
            limits,
            self._answer,
            FormCompiler(pipeline, folder),
            caches_prefixes=options["pipeline"]["caches_prefixes"],
        )
        self.facts = {
            "context_length": limits.tokens,
            "vocabulary_size": self._prompts.vocabulary_size,
            "blocks": pipeline.blocks,
            "block_tokens": pipeline.block_tokens,
            "chat_template": source,
        }

    def _answer(self, message: int, value: Any) -> None:
        if message != _TELL:
            self._channel.send([message, value])

    def run(self) -> None:
        """Serve until the server has nothing more to say.

        Raises:
            RuntimeError: the model is lost.
            ChannelLost: the socket is not there any more.
        """
        while self._take_messages():
            if self._engine.is_busy:
                self._channel.send([_TELL, self._engine.step()])

    def _take_messages(self) -> bool:
        """Take what has come, or wait for something where no text is made; False once nothing more will come."""
        started = time.monotonic()
        while True:
            if not self._channel.has_message():
                if self._engine.is_busy:
                    return True
                self._channel.wait(self._engine.descriptor)
                continue
            message = self._channel.receive()
            if message is None:
                return False
            self._take(*message.value)
            if self._engine.is_busy and time.monotonic() - started > _READS_SECONDS:
                return True

    def _take(self, number: int, value: list[Any]) -> None:
        kind, *parts = value
        if kind == "add":
            self._engine.add(number, *parts)
        elif kind == "tokenize":
            self._answer(number, self._tokenize(*parts))
        else:
            self._engine.cancel(*parts)

    def _tokenize(self, texts: list[str], options: dict[str, Any]) -> list[Any]:
        try:
            return [TOKENS, [self._prompts.tokenize(text, **options) for text in texts]]
        except ServerError as error:
            return [REFUSED, encode_failure(error)]


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Be an engine of the model that the first message names.

    Raises:
        RuntimeError: the model is lost.
        ChannelLost: the socket is not there any more.
    """
    try:
        program = EngineProgram(channel, options)
    except Exception as error:  # noqa: BLE001 - whatever it is, the server says why there is no model
        channel.send([number, [FAILED, reason_of(error)]])
        return
    channel.send([number, [LOADED, program.facts]])
    program.run()
