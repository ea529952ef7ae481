"""Compilation of structured-output grammars outside the batch, so that an invalid one does not fail a batch step."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Sampling
from ovmstrio.inference.engine.pipeline import configure_generation, library_error_message

if TYPE_CHECKING:
    from ovmstrio.core.generation import GenerationRequest, Grammar
    from ovmstrio.inference.engine.batch import QueuedRequest
    from ovmstrio.inference.engine.pipeline import Pipeline

_MODEL_FILE: Final = "openvino_model.xml"
_LOGITS: Final = "logits"
_TOKENS: Final = 2
_PROPERTIES: Final = {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": 1}


class GrammarCompiler:
    """Compiles grammars with a weightless pipeline; the shared tokenizer caches them for the batch."""

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self._batch = pipeline
        self._file = folder / _MODEL_FILE
        self._vocabulary = 0
        self._pipeline: Any = None

    def ask(self, request: GenerationRequest) -> Any:
        """Return the argument of :meth:`compile` for a request; call it in the thread that steps the batch."""
        defaults = self._batch.defaults()
        config = configure_generation(genai.GenerationConfig(), Sampling(temperature=0), grammar=request.grammar)
        config.max_new_tokens = _TOKENS
        config.eos_token_id = defaults.eos_token_id
        config.stop_token_ids = {*defaults.stop_token_ids, *request.sampling.stop_token_ids}
        return config

    def compile(self, config: Any) -> None:
        """Generate two tokens with a grammar, in one thread at a time.

        Raises:
            RuntimeError: the library rejects the grammar.
            OSError, LookupError: grammars cannot be checked with this model.
        """
        if self._pipeline is None:
            try:
                self._pipeline = self._make()
            except RuntimeError as error:
                # This says nothing about the grammar; the disk may be full, for example.
                raise LookupError(f"grammar check not available: {library_error_message(error)}") from error
        pipeline, self._pipeline = self._pipeline, None
        pipeline.generate(ov.Tensor(np.zeros((1, 1), np.int64)), config)
        # A pipeline that failed is not reused.
        self._pipeline = pipeline

    def _make(self) -> Any:
        self._vocabulary = self._vocabulary or _logits_of(self._file)
        with TemporaryDirectory() as folder:
            ov.serialize(_without_weights(self._vocabulary), Path(folder) / _MODEL_FILE)
            return genai.LLMPipeline(folder, self._batch.tokenizer, "CPU", **_PROPERTIES)


def _logits_of(file: Path) -> int:
    """Return the number of logits of a model, which may exceed the tokenizer's vocabulary."""
    if not file.is_file():
        raise FileNotFoundError(str(file))
    for output in ov.Core().read_model(file).outputs:
        last = output.partial_shape[-1] if output.partial_shape.rank.is_static else None
        if _LOGITS in output.names and last is not None and last.is_static:
            return int(last.get_length())
    raise LookupError(_LOGITS)


def _without_weights(vocabulary: int) -> ov.Model:
    """Return a model that gives all tokens the same logit."""
    ids, mask, places = (_input(name, 2, np.int64) for name in ("input_ids", "attention_mask", "position_ids"))
    beams = _input("beam_idx", 1, np.int32)
    one = opset13.constant(np.zeros((1, 1, 1), np.float32))
    shape = opset13.concat([opset13.shape_of(ids), opset13.constant(np.array([vocabulary], np.int64))], 0)
    logits = opset13.broadcast(one, shape)
    logits.output(0).set_names({_LOGITS})
    return ov.Model([opset13.result(logits)], [ids, mask, places, beams], "forms")


def _input(name: str, rank: int, kind: Any) -> Any:
    parameter = opset13.parameter([-1] * rank, kind, name=name)
    parameter.output(0).set_names({name})
    return parameter


_MAX_KNOWN: Final = 512
_NICENESS_STEP: Final = 10
_MAX_NICENESS: Final = 19


class _Compilation(NamedTuple):
    asked: QueuedRequest | None
    form: bytes
    done: Future[None] | None


class GrammarQueue:
    """FIFO queue of requests whose grammars are not known to work.

    Attributes:
        descriptor: event descriptor, readable from the end of a compilation until :meth:`take`.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "forms", _lower_priority)
        self._waiting: deque[QueuedRequest] = deque()
        self._current: _Compilation | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def waiting(self) -> int:
        """Number of requests queued or being compiled."""
        return len(self._waiting) + (self._current is not None and self._current.asked is not None)

    @property
    def has_ended(self) -> bool:
        """Return whether :meth:`take` has a result."""
        return self._current is not None and (self._current.done is None or self._current.done.done())

    def wait(self, queued: QueuedRequest) -> None:
        """Queue a request."""
        self._waiting.append(queued)

    def withdraw(self, queued: QueuedRequest) -> bool:
        """Remove a request and return whether it was here; a started compilation continues without effect."""
        if self._current is not None and self._current.asked is queued:
            self._current = self._current._replace(asked=None)
            return True
        found = [place for place, each in enumerate(self._waiting) if each is queued]
        for place in found:
            del self._waiting[place]
        return bool(found)

    def go_on(self, *, may_compile: bool) -> None:
        """Start the next compilation if none runs; a known grammar ends at once."""
        if self._current is not None or not self._waiting:
            return
        queued = self._waiting[0]
        form = _key(queued.request.grammar)
        if form in self._known:
            self._waiting.popleft()
            self._current = _Compilation(queued, form, None)
        elif may_compile:
            self._waiting.popleft()
            done = self._thread.submit(self._compile, self._compiler.ask(queued.request))
            self._current = _Compilation(queued, form, done)

    def _compile(self, config: Any) -> None:
        try:
            self._compiler.compile(config)
        finally:
            os.eventfd_write(self.descriptor, 1)

    def take(self) -> tuple[QueuedRequest, InvalidField | None] | None:
        """Return the finished request and the error of its grammar; None if it was withdrawn."""
        if self._current is None or not self.has_ended:
            return None
        (queued, form, done), self._current = self._current, None
        error = None
        if done is not None:
            os.eventfd_read(self.descriptor)
            error = done.exception()
        if isinstance(error, RuntimeError):
            why = f"response format rejected: {library_error_message(error)}"
            return None if queued is None else (queued, InvalidField(why, field="response_format"))
        if error is None:
            self._known[form] = None
            self._known.move_to_end(form)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        if queued is None:
            return None
        queued.is_grammar_proven = error is None
        return queued, None


def _lower_priority() -> None:
    """Lower the priority: the library's eight compile threads together get the share of one generating thread."""
    thread = threading.get_native_id()
    os.setpriority(
        os.PRIO_PROCESS, thread, min(_MAX_NICENESS, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS_STEP)
    )


def _key(grammar: Grammar | None) -> bytes:
    text = "" if grammar is None else f"{grammar.kind.value}\0{grammar.text}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
