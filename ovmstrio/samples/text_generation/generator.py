"""Python node that runs SmolLM2 with continuous batching over all streams."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openvino_genai as genai

from pyovms import Tensor, current_context

_DEFAULT_TOKENS = 128
_MOST_TOKENS = 1024
_CACHE_GIGABYTES = 1


def read_text(tensor: Tensor) -> str:
    """Return the text of a tensor, without the length prefix that KServe clients write before a BYTES element."""
    data = bytes(tensor)
    prefixed = tensor.datatype == "BYTES" and int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:].decode() if prefixed else data.decode()


def generation_config(parameters: Mapping[str, Any]) -> genai.GenerationConfig:
    """Return the generation settings of the first request's parameters; greedy unless ``do_sample`` is true."""
    tokens = parameters.get("max_new_tokens", _DEFAULT_TOKENS)
    if not isinstance(tokens, int) or not 1 <= tokens <= _MOST_TOKENS:
        raise ValueError(f"max_new_tokens: expected a number from 1 to {_MOST_TOKENS}, got {tokens!r}")
    return genai.GenerationConfig(max_new_tokens=tokens, do_sample=bool(parameters.get("do_sample", False)))


class OvmsPythonModel:
    """Node with the model; each stream adds a request to the batch and runs batch steps while it waits."""

    def initialize(self, kwargs: dict[str, Any]) -> None:
        """Load the model from the folder of the graph."""
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIGABYTES
        self._pipeline = genai.ContinuousBatchingPipeline(Path(kwargs["base_path"]) / "model", scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._step_lock = threading.Lock()

    def execute(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Stream the answer to one prompt; a client disconnect closes the generator and ends its request."""
        config = generation_config(current_context().parameters)
        chat = [{"role": "user", "content": read_text(inputs[0])}]
        handle = self._pipeline.add_request(
            next(self._numbers), self._tokenizer.apply_chat_template(chat, add_generation_prompt=True), config
        )
        try:
            for text in self._texts(handle):
                yield [Tensor("completion", text.encode())]
        finally:
            handle.stop()
        yield [Tensor("end_signal", b"")]

    def _texts(self, handle: Any) -> Iterator[str]:
        """Stream complete characters; a token may end within a character."""
        tokens: list[int] = []
        sent = 0
        for token in self._tokens(handle):
            tokens.append(token)
            text = self._tokenizer.decode(tokens)
            if len(text) > sent and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[sent:]
                sent = len(text)

    def _tokens(self, handle: Any) -> Iterator[int]:
        """Stream this request's tokens, including those that another stream's step generated."""
        while True:
            with self._step_lock:
                if not handle.can_read():
                    if handle.get_status() != genai.GenerationStatus.RUNNING:
                        return
                    self._pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    yield from output.generated_ids
