"""Compiles the forms of answers where no text is made: what cannot be compiled fails here, and not in the batch."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Sampling
from ovmstrio.inference.engine.pipeline import reason_of
from ovmstrio.inference.engine.sequences import configure

if TYPE_CHECKING:
    from ovmstrio.core.generation import GenerationRequest, Grammar
    from ovmstrio.inference.engine.pipeline import Pipeline
    from ovmstrio.inference.engine.sequences import AskedTexts

__all__ = ["CompilesForms", "FormCompiler", "FormTrials"]

# ----------------------------------------------------------------------
# Compiles the forms of answers where no text is made: what cannot be compiled fails here, and not in the batch
# ----------------------------------------------------------------------

_MODEL_FILE: Final = "openvino_model.xml"
_LOGITS: Final = "logits"
_TOKENS: Final = 2
_PROPERTIES: Final = {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": 1}


class FormCompiler:
    """A pipeline of a model without weights, whose tokenizer is the batch's.

    The library keeps what is compiled of a form with the tokenizer, so that the batch finds it there.

    Args:
        pipeline: makes the texts.
        folder: of its model, whose number of logits is read when the first form comes.
    """

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self._batch = pipeline
        self._file = folder / _MODEL_FILE
        self._vocabulary = 0
        self._pipeline: Any = None

    def ask(self, request: GenerationRequest) -> Any:
        """Give what :meth:`compile` is to be told of a request, in the thread that steps the batch."""
        defaults = self._batch.defaults()
        config = configure(genai.GenerationConfig(), Sampling(temperature=0), grammar=request.grammar)
        config.max_new_tokens = _TOKENS
        config.eos_token_id = defaults.eos_token_id
        config.stop_token_ids = {*defaults.stop_token_ids, *request.sampling.stop_token_ids}
        return config

    def compile(self, config: Any) -> None:
        """Make two tokens in a form, in any one thread at a time; others run meanwhile.

        Raises:
            RuntimeError: the library does not take the form.
            OSError, LookupError: no form can be tried with this model.
        """
        if self._pipeline is None:
            try:
                self._pipeline = self._make()
            except RuntimeError as error:
                # That says nothing of the form, as where a disk is full.
                raise LookupError(f"no form can be tried: {reason_of(error)}") from error
        pipeline, self._pipeline = self._pipeline, None
        pipeline.generate(ov.Tensor(np.zeros((1, 1), np.int64)), config)
        # One that has failed may be in any state.
        self._pipeline = pipeline

    def _make(self) -> Any:
        self._vocabulary = self._vocabulary or _logits_of(self._file)
        with TemporaryDirectory() as folder:
            ov.serialize(_without_weights(self._vocabulary), Path(folder) / _MODEL_FILE)
            return genai.LLMPipeline(folder, self._batch.tokenizer, "CPU", **_PROPERTIES)


def _logits_of(file: Path) -> int:
    """Read how many logits a model gives for a token, which may be more than its tokenizer knows tokens.

    Raises:
        OSError: there is no such file.
        LookupError: it does not tell.
    """
    if not file.is_file():
        raise FileNotFoundError(str(file))
    for output in ov.Core().read_model(file).outputs:
        last = output.partial_shape[-1] if output.partial_shape.rank.is_static else None
        if _LOGITS in output.names and last is not None and last.is_static:
            return int(last.get_length())
    raise LookupError(_LOGITS)


def _without_weights(vocabulary: int) -> ov.Model:
    """Give a model to which all tokens are alike."""
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


# ----------------------------------------------------------------------
# Forms of answers on trial: each is compiled once beside the batch before its text may join it
# ----------------------------------------------------------------------

_REMEMBERED: Final = 512
"""How many forms are known to be taken, those that came last."""
_NICER: Final = 10
_LEAST: Final = 19


class CompilesForms(Protocol):
    """What forms are tried with; see :class:`FormCompiler`."""

    def ask(self, request: GenerationRequest) -> Any:
        """Give what :meth:`compile` is to be told of a request."""
        ...

    def compile(self, config: Any) -> None:
        """Compile a form, in a thread."""
        ...


class _Trial(NamedTuple):
    """What is tried for whom, None for nobody any more."""

    asked: AskedTexts | None
    form: bytes
    done: Future[None] | None


class FormTrials:
    """Requests whose forms are not known yet, in the order in which they have come.

    Args:
        compiler: what they are tried with.

    Attributes:
        descriptor: can be read once a trial has ended, until :meth:`take`.
    """

    def __init__(self, compiler: CompilesForms) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "forms", _yield_to_others)
        self._waiting: deque[AskedTexts] = deque()
        self._trial: _Trial | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def waiting(self) -> int:
        """How many requests wait for a trial, or for its end."""
        return len(self._waiting) + (self._trial is not None and self._trial.asked is not None)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take` has something to give."""
        return self._trial is not None and (self._trial.done is None or self._trial.done.done())

    def wait(self, asked: AskedTexts) -> None:
        """Put a request at the end of those that wait."""
        self._waiting.append(asked)

    def withdraw(self, asked: AskedTexts) -> bool:
        """Forget a request, and tell whether it was here; a trial goes on to its end for nobody."""
        if self._trial is not None and self._trial.asked is asked:
            self._trial = self._trial._replace(asked=None)
            return True
        found = [place for place, each in enumerate(self._waiting) if each is asked]
        for place in found:
            del self._waiting[place]
        return bool(found)

    def go_on(self, *, may_compile: bool) -> None:
        """Begin the next trial, if there is none; of a form that is known it is over at once."""
        if self._trial is not None or not self._waiting:
            return
        asked = self._waiting[0]
        form = _key(asked.request.grammar)
        if form in self._known:
            self._waiting.popleft()
            self._trial = _Trial(asked, form, None)
        elif may_compile:
            self._waiting.popleft()
            self._compile_for(asked, form)

    def _compile_for(self, asked: AskedTexts, form: bytes) -> None:
        self._trial = _Trial(asked, form, self._thread.submit(self._compile, self._compiler.ask(asked.request)))

    def _compile(self, config: Any) -> None:
        try:
            self._compiler.compile(config)
        finally:
            os.eventfd_write(self.descriptor, 1)

    def take(self) -> tuple[AskedTexts, InvalidField | None] | None:
        """Give the request whose trial has ended, and what is wrong with its form; None for nobody."""
        if self._trial is None or not self.has_ended:
            return None
        (asked, form, done), self._trial = self._trial, None
        error = None
        if done is not None:
            os.eventfd_read(self.descriptor)
            error = done.exception()
        if isinstance(error, RuntimeError):
            why = f"the form of the answer cannot be used: {reason_of(error)}"
            return None if asked is None else (asked, InvalidField(why, field="response_format"))
        if error is None:
            self._remember(form)
        if asked is None:
            return None
        asked.is_proven = error is None
        return asked, None

    def _remember(self, form: bytes) -> None:
        self._known[form] = None
        self._known.move_to_end(form)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def _yield_to_others() -> None:
    """Let the threads in which the library compiles, eight of them, have together what one has that makes texts."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(_LEAST, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))


def _key(grammar: Grammar | None) -> bytes:
    told = "" if grammar is None else f"{grammar.kind.value}\0{grammar.text}"
    return hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=16).digest()
