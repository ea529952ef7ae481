"""Embedding and reranking models and their tokenizers, compiled for OpenVINO."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.compile import ModelFile, compile_loaded
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.model_readers import read_model
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core, openvino_error_message
from ovmstrio.inference.tuner import Placement
from ovmstrio.util.extras import Extra, install_command

# ----------------------------------------------------------------------
# Tokenizers: the operations library, special tokens, and a ragged form without padding
# ----------------------------------------------------------------------

_PACKAGE: Final = "openvino_tokenizers"
_LIBRARY: Final = "libopenvino_tokenizers*.so*"

_lock: Final = threading.Lock()
_loaded: list[ctypes.CDLL] = []


def load_tokenizer_operations() -> None:
    """Register the tokenizer operations with the process's core; once, from any thread.

    The package is not imported, because that would patch every core of the process.

    Raises:
        ConfigError: the package is missing, or built for another OpenVINO version.
    """
    with _lock:
        if _loaded:
            return
        path = _find()
        try:
            core().add_extension(str(path))
            # Objects of the library may outlive all others at exit, so it must stay loaded.
            _loaded.append(ctypes.CDLL(str(path)))
        except (*OPENVINO_ERRORS, OSError) as error:
            message = f"{_PACKAGE} does not match this OpenVINO version: {openvino_error_message(error)}"
            raise ConfigError([_problem(message, path)]) from error


def _find() -> Path:
    package = find_spec(_PACKAGE)
    for folder in package.submodule_search_locations or () if package is not None else ():
        for path in sorted((Path(folder) / "lib").glob(_LIBRARY)):
            return path
    raise ConfigError([_problem(f"tokenizers need the package {_PACKAGE}, which is not installed")])


def _problem(message: str, path: Path | None = None) -> Problem:
    return Problem(message, file="" if path is None else str(path), suggestion=install_command(Extra.LLM))


COMBINE_SEGMENTS: Final = "CombineSegments"
_TEMPLATES: Final = "processed_post_processor_template"
_PARTS_OF_INPUT: Final = 3
_PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class SpecialTokenTemplate:
    """Special tokens before, between and after texts, with one place more than texts.

    ``types`` are the token types of the texts, ``special_token_types`` those of the special tokens.
    """

    marks: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]
    special_token_types: tuple[tuple[int, ...], ...]

    @property
    def added(self) -> int:
        """Number of special tokens."""
        return sum(map(len, self.marks))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Templates for one text and for a pair of texts; None if unknown."""

    single: SpecialTokenTemplate
    pair: SpecialTokenTemplate | None


def read_special_tokens(model: ov.Model, combine: ov.Node | None) -> SpecialTokens:
    """Read special tokens from a converted tokenizer; ``combine`` is the operation that adds them, if any."""
    single = _template(_parts_of(combine) if combine is not None else [(None, 0)])
    written = _templates(model)
    if "pair" not in written:
        return SpecialTokens(single, _repeat_end(single))
    pair = _template(_parts_of_list(written["pair"]))
    return SpecialTokens(single, pair if len(pair.types) == _PAIR else None)


def _parts_of(combine: ov.Node) -> Iterator[tuple[list[int] | None, int]]:
    """Yield tokens and type of each part that the operation joins, None as tokens for the text."""
    segments = combine.input_value(combine.get_input_size() - 1).get_node().get_data().reshape(-1).tolist()
    for number in range((combine.get_input_size() - 1) // _PARTS_OF_INPUT):
        begin, end, ids = (combine.input_value(_PARTS_OF_INPUT * number + each).get_node() for each in range(3))
        if ids.get_type_name() != "Constant":
            yield None, int(segments[number])
            continue
        first, last = (int(each.get_data().reshape(-1)[0]) for each in (begin, end))
        yield ids.get_data().reshape(-1)[first:last].tolist(), int(segments[number])


def _parts_of_list(written: Mapping[str, Any]) -> Iterator[tuple[list[int] | None, int]]:
    """Yield tokens and type of each item of a list, in which negative ids stand for texts."""
    for ids, kind in zip(written["ids"], written["type_ids"], strict=True):
        yield ids if isinstance(ids, list) else [ids] if ids >= 0 else None, int(kind)


def _template(parts: Iterable[tuple[list[int] | None, int]]) -> SpecialTokenTemplate:
    marks: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    of_texts = []
    for ids, kind in parts:
        if ids is None:
            of_texts.append(kind)
            marks.append([])
            types.append([])
        else:
            marks[-1] += ids
            types[-1] += [kind] * len(ids)
    return SpecialTokenTemplate(tuple(map(tuple, marks)), tuple(of_texts), tuple(map(tuple, types)))


def _repeat_end(single: SpecialTokenTemplate) -> SpecialTokenTemplate | None:
    """Repeat the tokens after the first text after the second one, as BERT does."""
    before, after = single.marks
    if not after:
        return None
    types = (tuple(0 for _ in before), tuple(0 for _ in after), tuple(1 for _ in after))
    return SpecialTokenTemplate((before, after, after), (0, 1), types)


def _templates(model: ov.Model) -> Mapping[str, Any]:
    if not model.has_rt_info(_TEMPLATES):
        return {}
    try:
        written = json.loads(str(model.get_rt_info(_TEMPLATES).value))
    except ValueError:
        return {}
    return written if isinstance(written, dict) else {}


_INPUTS: Final = (("begins", np.int32), ("ends", np.int32), ("letters", np.uint8))
_OUTPUTS: Final = ("token_begins", "token_ends", "tokens")
_TRUNCATE: Final = "Truncate"
_PAD: Final = "RaggedToDense"
_PAD_ID: Final = 4


@dataclass(frozen=True, slots=True)
class RaggedTokenizer:
    """Tokenizer model without special tokens and padding.

    The model takes ``begins`` and ``ends`` INT32 [texts], the byte ranges of the texts in ``letters`` UINT8 [-1], and
    returns ``token_begins`` and ``token_ends`` INT32 [texts] and ``tokens`` INT32 [1,-1].
    """

    model: ov.Model
    special_tokens: SpecialTokens
    pad_id: int


def read_tokenizer(file: Path) -> RaggedTokenizer:
    """Read ``openvino_tokenizer.xml``; raise ConfigError if it does not have the expected structure. Blocks."""
    load_tokenizer_operations()
    model = read_model(file)
    unpack = next((node for node in model.get_ordered_ops() if node.get_type_name() == "StringTensorUnpack"), None)
    pad = next((node for node in model.get_ordered_ops() if node.get_type_name() == _PAD), None)
    if unpack is None or pad is None:
        found = ", ".join(sorted({node.get_type_name() for node in model.get_ops()}))
        expected = f"the operations StringTensorUnpack and {_PAD}"
        raise ConfigError([Problem("unknown tokenizer structure", file=str(file), expected=expected, found=found)])
    combine, tokens = _find_tokens(pad)
    special_tokens = read_special_tokens(model, combine)
    pad_id = int(pad.input_value(_PAD_ID).get_node().get_data().reshape(-1)[0])
    ragged = ov.Model(_named_results(tokens), _replace_inputs(unpack), "tokenizer")
    return RaggedTokenizer(ragged, special_tokens, pad_id)


def _find_tokens(pad: ov.Node) -> tuple[ov.Node | None, Sequence[ov.Output]]:
    """Return the operation that adds special tokens, and the outputs with a text's tokens before it."""
    combine = None
    parts = [pad.input_value(number) for number in range(3)]
    while True:
        source = parts[2].get_node()
        if source.get_type_name() == COMBINE_SEGMENTS:
            combine = source
            groups = (
                [source.input_value(at + each) for each in range(3)] for at in range(0, source.get_input_size() - 1, 3)
            )
            parts = next(group for group in groups if group[2].get_node().get_type_name() != "Constant")
        elif source.get_type_name() == _TRUNCATE:
            parts = [source.input_value(number) for number in range(3)]
        elif parts[0].get_node() != source and source.get_output_size() == len(parts):
            # Earlier converters truncate by moving the begins or ends.
            return combine, source.outputs()
        else:
            return combine, parts


def _replace_inputs(unpack: ov.Node) -> list[ov.Node]:
    parameters = []
    for number, (name, dtype) in enumerate(_INPUTS):
        parameter = op.parameter(ov.PartialShape([-1]), dtype, name=name)
        parameter.output(0).set_names({name})
        for target in unpack.output(number).get_target_inputs():
            target.replace_source_output(parameter.output(0))
        parameters.append(parameter)
    return parameters


def _named_results(tokens: Sequence[ov.Output]) -> list[ov.Node]:
    results = []
    # Texts may have no tokens, and an empty one-dimensional output would look like a failed run.
    row = op.unsqueeze(tokens[2], np.array([0]))
    for name, output in zip(_OUTPUTS, (*tokens[:2], row.output(0)), strict=True):
        output.set_names({name})
        results.append(op.result(output))
    return results


# ----------------------------------------------------------------------
# Embedding and reranking models
# ----------------------------------------------------------------------

_POOLINGS: Final = ("CLS", "LAST", "MEAN")
TEXT_MODEL_INPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_POOLED_OUTPUT: Final = "sentence_embedding"
_TOKEN_OUTPUTS: Final = ("last_hidden_state", "token_embeddings")
_SCORES: Final = "logits"
_RANK_OF_TEXTS: Final = 2
_RANK_OF_TOKENS: Final = 3
_NORM_EPSILON: Final = 1e-12
_EXPECTED_INPUTS: Final = "input_ids, attention_mask and, if any, token_type_ids and position_ids"


def add_pooling(model: ov.Model, pooling: str, *, normalize: bool, file: str) -> ov.Model:
    """Return the model with a single output ``embeddings``, f32 [texts, dimensions], of length 1 if ``normalize``.

    An existing output ``sentence_embedding`` (Optimum's name for pooled embeddings) is used as is. MEAN excludes
    padding.

    Raises:
        ConfigError: inputs or outputs are not those of an embedding model, or its pooling is not supported.
    """
    inputs = _inputs(model, file)
    outputs = _outputs(model)
    pooled = outputs.get(_POOLED_OUTPUT)
    if pooled is None or pooled.get_partial_shape().rank != _RANK_OF_TEXTS:
        if pooling not in _POOLINGS:
            problem = Problem("the pooling of the model is not supported", file=file, path="pooling")
            hint = "set pooling, or export the model with an output sentence_embedding"
            raise ConfigError([replace(problem, expected=" or ".join(_POOLINGS), found=pooling, suggestion=hint)])
        pooled = _pooled(_token_output(outputs, file), inputs["attention_mask"], pooling)
    result = op.convert(pooled, np.float32)
    if normalize:
        result = op.normalize_l2(result, _ints(1), _NORM_EPSILON, "max")
    return _named(model, result, "embeddings")


def add_scoring(model: ov.Model, file: str) -> ov.Model:
    """Return the model with a single output ``scores``, f32 [texts], from 0 to 1.

    One logit per text is passed through the logistic function; of two the softmax of the second is used.

    Raises:
        ConfigError: the model has no logits per text, or more than two.
    """
    _inputs(model, file)
    logits = _outputs(model).get(_SCORES)
    shape = None if logits is None else logits.get_partial_shape()
    count = shape[1].get_length() if shape is not None and shape.rank == _RANK_OF_TEXTS and shape[1].is_static else 0
    if logits is None or count not in (1, 2):
        found = ", ".join(f"{name} {each.get_partial_shape()}" for name, each in _outputs(model).items())
        message = "not a reranking model"
        raise ConfigError([Problem(message, file=file, expected="an output logits [?,1] or [?,2]", found=found)])
    wide = op.convert(logits, np.float32)
    scores = op.sigmoid(wide) if count == 1 else op.softmax(wide, 1)
    return _named(model, op.gather(scores, _scalar(count - 1), _scalar(1)), "scores")


def _pooled(tokens: ov.Output, mask: ov.Output, pooling: str) -> ov.Node:
    """[texts, tokens, numbers] -> [texts, numbers]; padding follows the tokens."""
    if pooling == "CLS":
        return op.gather(tokens, _scalar(0), _scalar(1))
    counted = op.convert(mask, np.int64)
    if pooling == "LAST":
        last = op.subtract(op.reduce_sum(counted, _ints(1), keep_dims=False), _scalar(1))
        picked = op.gather(tokens, op.unsqueeze(last, _ints(1)), _scalar(1), batch_dims=1)
        return op.squeeze(picked, _ints(1))
    wide = op.convert(tokens, np.float32)
    present = op.unsqueeze(op.convert(counted, np.float32), _ints(2))
    total = op.reduce_sum(op.multiply(wide, present), _ints(1), keep_dims=False)
    return op.divide(total, op.reduce_sum(present, _ints(1), keep_dims=False))


def _inputs(model: ov.Model, file: str) -> Mapping[str, ov.Output]:
    found = {name: port for port in model.inputs for name in port.get_names() & TEXT_MODEL_INPUTS}
    if len(found) == len(model.inputs) and {"input_ids", "attention_mask"} <= found.keys():
        return found
    names = ", ".join(sorted(name for port in model.inputs for name in port.get_names()))
    raise ConfigError([Problem("not a text model", file=file, expected=_EXPECTED_INPUTS, found=names)])


def _outputs(model: ov.Model) -> dict[str, ov.Output]:
    return {name: port.get_node().input_value(0) for port in model.outputs for name in port.get_names()}


def _token_output(outputs: Mapping[str, ov.Output], file: str) -> ov.Output:
    for name in (*_TOKEN_OUTPUTS, *outputs):
        if name in outputs and outputs[name].get_partial_shape().rank == _RANK_OF_TOKENS:
            return outputs[name]
    found = ", ".join(f"{name} {each.get_partial_shape()}" for name, each in outputs.items())
    expected = f"an output {' or '.join(_TOKEN_OUTPUTS)} [?,?,?], or {_POOLED_OUTPUT} [?,?]"
    raise ConfigError([Problem("not an embedding model", file=file, expected=expected, found=found)])


def _named(model: ov.Model, result: ov.Node, name: str) -> ov.Model:
    result.output(0).set_names({name})
    return ov.Model([op.result(result)], model.get_parameters(), model.get_friendly_name())


def _ints(*values: int) -> ov.Node:
    return op.constant(np.array(values, np.int64))


def _scalar(value: int) -> ov.Node:
    return op.constant(np.int64(value))


# Embeddings are compared with those of other machines, which round differently in lower precision.
_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32"}
_MOST_TOKENIZED_AT_ONCE: Final = 4
_HINTS: Final = {"PERFORMANCE_HINT", "NUM_STREAMS"}
# Requests are batched, and one batch per core is faster than all cores on one batch.
_THROUGHPUT: Final = {"PERFORMANCE_HINT": "THROUGHPUT"}


@dataclass(frozen=True, slots=True)
class CompiledTokenizer:
    """Compiled ragged tokenizer with its special and padding tokens."""

    compiled: Compiled
    special_tokens: SpecialTokens
    pad_id: int


def compile_tokenizer(file: Path, name: str) -> CompiledTokenizer:
    """Read and compile a tokenizer, which never runs on the event loop: texts may have any length. Blocks."""
    read = read_tokenizer(file)
    # A few texts in parallel, each on one thread: no tokenizer operation uses more.
    count = str(min(len(os.sched_getaffinity(0)), _MOST_TOKENIZED_AT_ONCE))
    config = {"NUM_STREAMS": count, "INFERENCE_NUM_THREADS": count, "ENABLE_CPU_PINNING": "NO"}
    spec = ModelSpec(name=name, base_path=file.parent, plugin_config=config)
    compiled = compile_loaded(read.model, ModelFile(file, spec))
    return CompiledTokenizer(replace(compiled, placement=Placement.away(), loop=None), read.special_tokens, read.pad_id)


def compile_embedder(source: ModelFile, pooling: str, *, normalize: bool) -> Compiled:
    """Read and compile an embedding model; see :func:`add_pooling`. Blocks."""
    model = add_pooling(read_model(source.file), pooling, normalize=normalize, file=str(source.file))
    return compile_loaded(model, _with_defaults(source))


def compile_scorer(source: ModelFile) -> Compiled:
    """Read and compile a reranking model; see :func:`add_scoring`. Blocks."""
    return compile_loaded(add_scoring(read_model(source.file), str(source.file)), _with_defaults(source))


def _with_defaults(source: ModelFile) -> ModelFile:
    chosen = source.spec.plugin_config
    config = {**_EXACT, **({} if _HINTS & chosen.keys() else _THROUGHPUT), **chosen}
    return replace(source, spec=source.spec.model_copy(update={"plugin_config": config}))
