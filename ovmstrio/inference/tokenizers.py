"""Converted tokenizers: the operations library, special tokens, and a ragged form without padding."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.model_readers import read_model
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core, openvino_error_message
from ovmstrio.util.extras import Extra, way_to_install

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
    return Problem(message, file="" if path is None else str(path), suggestion=way_to_install(Extra.LLM))


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
