"""Compilation of structured-output grammars outside the batch, so that an invalid one does not fail a batch step."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Grammar, GrammarKind, Sampling
from ovmstrio.inference.engine.messages import GRAMMAR_FIELD, LANGUAGE_MODEL_FILE
from ovmstrio.inference.engine.pipeline import configure_generation, library_error_message, set_grammar

if TYPE_CHECKING:
    from ovmstrio.core.generation import GenerationRequest
    from ovmstrio.inference.engine.batch import QueuedRequest
    from ovmstrio.inference.engine.pipeline import Pipeline

_MODEL_FILE: Final = "openvino_model.xml"
_LOGITS: Final = "logits"
_TOKENS: Final = 2
_MAX_PART_COMPILATIONS: Final = 32
_PROPERTIES: Final = {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": 1}


class GrammarCompiler:
    """Compiles grammars with a weightless pipeline; the shared tokenizer caches them for the batch."""

    def __init__(self, pipeline: Pipeline, folder: Path) -> None:
        self._batch = pipeline
        file = folder / LANGUAGE_MODEL_FILE
        self._file = file if file.is_file() else folder / _MODEL_FILE
        self._vocabulary = 0
        self._pipeline: Any = None

    def ask(self, request: GenerationRequest) -> tuple[Any, Grammar | None]:
        """Return the argument of :meth:`compile` for a request; call it in the thread that steps the batch."""
        defaults = self._batch.defaults()
        config = configure_generation(genai.GenerationConfig(), Sampling(temperature=0), grammar=request.grammar)
        config.max_new_tokens = _TOKENS
        config.eos_token_id = defaults.eos_token_id
        config.stop_token_ids = {*defaults.stop_token_ids, *request.sampling.stop_token_ids}
        return config, request.grammar

    def compile(self, asked: tuple[Any, Grammar | None]) -> None:
        """Generate two tokens with a grammar, in one thread at a time.

        Raises:
            RuntimeError: the library rejects the grammar; the message has the path of the rejected part, if known.
            OSError, LookupError: grammars cannot be checked with this model.
        """
        config, grammar = asked
        try:
            self._generate(config)
        except RuntimeError as error:
            message = library_error_message(error)
            path = "" if grammar is None else self._find_rejected_part(config, grammar, message)
            raise RuntimeError(f"at {path}: {message}" if path else message) from error

    def _generate(self, config: Any) -> None:
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

    def _find_rejected_part(self, config: Any, grammar: Grammar, message: str) -> str:
        """Return the path of the smallest part that is rejected for the same reason, which the library does not name.

        The number of compilations is bounded, because other grammars wait.
        """
        if grammar.kind not in {GrammarKind.JSON_SCHEMA, GrammarKind.STRUCTURAL_TAG}:
            return ""
        root = "$.format" if grammar.kind is GrammarKind.STRUCTURAL_TAG else "$"
        path, left = root, _MAX_PART_COMPILATIONS
        parts = list(_grammar_parts(grammar))
        while parts and left:
            left -= 1
            place, part = parts.pop(0)
            set_grammar(config, part)
            try:
                self._generate(config)
            except RuntimeError as error:
                if library_error_message(error) == message:
                    path += place
                    parts = list(_grammar_parts(part))
            except LookupError:
                break
        return "" if path == root else path

    def _make(self) -> Any:
        self._vocabulary = self._vocabulary or _logits_of(self._file)
        with TemporaryDirectory() as folder:
            ov.serialize(_without_weights(self._vocabulary), Path(folder) / _MODEL_FILE)
            return genai.LLMPipeline(folder, self._batch.tokenizer, "CPU", **_PROPERTIES)


_DEFINITIONS: Final = ("$defs", "definitions")
_NAMED_SCHEMAS: Final = (*_DEFINITIONS, "properties", "patternProperties")
_LISTED_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS: Final = ("items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "propertyNames")
_NESTED_GRAMMARS: Final = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "pattern": GrammarKind.REGEX,
    "grammar": GrammarKind.EBNF,
}


def _grammar_parts(grammar: Grammar) -> Iterator[tuple[str, Grammar]]:
    """Return the direct parts of a JSON schema or structural tag that are grammars themselves, with relative paths."""
    if grammar.kind is GrammarKind.STRUCTURAL_TAG:
        form = json.loads(grammar.text).get("format")
        yield from _tag_parts(form) if isinstance(form, Mapping) else ()
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = json.loads(grammar.text)
        yield from _schema_parts(schema) if isinstance(schema, Mapping) else ()


def _tag_parts(form: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    for keyword, kind in _NESTED_GRAMMARS.items():
        if keyword in form:
            value = form[keyword]
            yield f".{keyword}", Grammar(kind, json.dumps(value) if kind is GrammarKind.JSON_SCHEMA else value)
    for keyword in ("elements", "tags", "content"):
        value = form.get(keyword)
        listed = value if isinstance(value, list) else [value]
        for number, part in enumerate(listed):
            if isinstance(part, Mapping):
                tag = {"type": "structural_tag", "format": {"type": "tag", **part}}
                place = f".{keyword}[{number}]" if isinstance(value, list) else f".{keyword}"
                yield place, Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))


def _schema_parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
    found: list[tuple[str, Any]] = []
    for word in _NAMED_SCHEMAS:
        named = schema.get(word)
        found += [(f".{word}.{name}", part) for name, part in named.items()] if isinstance(named, Mapping) else []
    for word in _LISTED_SCHEMAS:
        listed = schema.get(word)
        found += [(f".{word}[{place}]", part) for place, part in enumerate(listed)] if isinstance(listed, list) else []
    found += [(f".{word}", schema[word]) for word in _SINGLE_SCHEMAS if word in schema]
    for place, part in found:
        if isinstance(part, Mapping):
            yield place, Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**definitions, **part}))


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
            why = f"{GRAMMAR_FIELD}: {library_error_message(error)}"
            refused = InvalidField(why, field=GRAMMAR_FIELD, code="invalid_grammar")
            return None if queued is None else (queued, refused)
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
