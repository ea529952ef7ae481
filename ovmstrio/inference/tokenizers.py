"""The library with the operations of tokenizers, which OpenVINO itself does not have."""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.inference.reading import read_model
from ovmstrio.inference.runtime import OPENVINO_ERRORS, core, reason
from ovmstrio.util.extras import Extra, way_to_install

__all__ = [
    "RaggedTokenizer",
    "SpecialTokens",
    "Template",
    "load_tokenizer_operations",
    "read_special_tokens",
    "read_tokenizer",
]

# ----------------------------------------------------------------------
# The library with the operations of tokenizers, which OpenVINO itself does not have
# ----------------------------------------------------------------------

_PACKAGE: Final = "openvino_tokenizers"
_LIBRARY: Final = "libopenvino_tokenizers*.so*"

_lock: Final = threading.Lock()
_loaded: list[ctypes.CDLL] = []


def load_tokenizer_operations() -> None:
    """Let the process's core know the operations; once, from any thread.

    The package is not imported: that would change what every core of the process does.

    Raises:
        ConfigError: the package is not there, or not of this version of OpenVINO.
    """
    with _lock:
        if _loaded:
            return
        path = _find()
        try:
            core().add_extension(str(path))
            # Objects of the library may be the last that the process ends with, so that it must stay until then.
            _loaded.append(ctypes.CDLL(str(path)))
        except (*OPENVINO_ERRORS, OSError) as error:
            message = f"the tokenizers' operations do not fit this OpenVINO: {reason(error)}"
            raise ConfigError([_problem(message, path)]) from error


def _find() -> Path:
    package = find_spec(_PACKAGE)
    for folder in package.submodule_search_locations or () if package is not None else ():
        for path in sorted((Path(folder) / "lib").glob(_LIBRARY)):
            return path
    raise ConfigError([_problem(f"tokenizers need the package {_PACKAGE}, which is not there")])


def _problem(message: str, path: Path | None = None) -> Problem:
    return Problem(message, file="" if path is None else str(path), suggestion=way_to_install(Extra.LLM))


# ----------------------------------------------------------------------
# What stands around the tokens of a text, and between those of two
# ----------------------------------------------------------------------

COMBINE: Final = "CombineSegments"
_TEMPLATES: Final = "processed_post_processor_template"
_PARTS_OF_INPUT: Final = 3
_PAIR: Final = 2


@dataclass(frozen=True, slots=True)
class Template:
    """Tokens before, between and behind texts, a place more than there are texts; ``types`` is the one of each text.

    ``mark_types`` has the types of the tokens at those places.
    """

    marks: tuple[tuple[int, ...], ...]
    types: tuple[int, ...]
    mark_types: tuple[tuple[int, ...], ...]

    @property
    def added(self) -> int:
        """How many tokens come to those of the texts."""
        return sum(map(len, self.marks))


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What is put around one text, and around two that belong together, None where that is not known."""

    single: Template
    pair: Template | None


def read_special_tokens(model: ov.Model, combine: ov.Node | None) -> SpecialTokens:
    """Read them out of a tokenizer as it was converted.

    Args:
        model: the tokenizer, whose ``rt_info`` may have templates.
        combine: the operation that puts marks around a text; None in a tokenizer that has none.
    """
    single = _of_operation(combine) if combine is not None else Template(((), ()), (0,), ((), ()))
    written = _templates(model)
    pair = _of_template(written["pair"], _PAIR) if "pair" in written else _as_bert_does(single)
    return SpecialTokens(single, pair)


def _of_operation(combine: ov.Node) -> Template:
    """Read what the operation joins: parts of three inputs each, constants but for the text."""
    marks: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    of_text = 0
    segments = combine.input_value(combine.get_input_size() - 1).get_node().get_data().reshape(-1).tolist()
    for number in range((combine.get_input_size() - 1) // _PARTS_OF_INPUT):
        begin, end, ids = (combine.input_value(_PARTS_OF_INPUT * number + each).get_node() for each in range(3))
        if ids.get_type_name() != "Constant":
            of_text = int(segments[number])
            marks.append([])
            types.append([])
            continue
        first, last = (int(each.get_data().reshape(-1)[0]) for each in (begin, end))
        added = ids.get_data().reshape(-1)[first:last].tolist()
        marks[-1] += added
        types[-1] += [int(segments[number])] * len(added)
    return Template(_frozen(marks), (of_text,), _frozen(types))


def _of_template(written: Mapping[str, Any], texts: int) -> Template | None:
    """Read a list of tokens, those below 0 standing for texts; None if it is no such list."""
    marks: list[list[int]] = [[]]
    types: list[list[int]] = [[]]
    of_texts = []
    for ids, kind in zip(written["ids"], written["type_ids"], strict=True):
        if not isinstance(ids, list) and ids < 0:
            of_texts.append(int(kind))
            marks.append([])
            types.append([])
            continue
        added = ids if isinstance(ids, list) else [ids]
        marks[-1] += added
        types[-1] += [int(kind)] * len(added)
    return Template(_frozen(marks), tuple(of_texts), _frozen(types)) if len(of_texts) == texts else None


def _as_bert_does(single: Template) -> Template | None:
    """Repeat behind the second text what stands behind the first."""
    before, behind = single.marks
    if not behind:
        return None
    types = (tuple(0 for _ in before), tuple(0 for _ in behind), tuple(1 for _ in behind))
    return Template((before, behind, behind), (0, 1), types)


def _templates(model: ov.Model) -> Mapping[str, Any]:
    if not model.has_rt_info(_TEMPLATES):
        return {}
    try:
        written = json.loads(str(model.get_rt_info(_TEMPLATES).value))
    except ValueError:
        return {}
    return written if isinstance(written, dict) else {}


def _frozen(lists: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each) for each in lists)


# ----------------------------------------------------------------------
# A tokenizer that was converted for OpenVINO, cut down to what every text needs: bytes in, tokens out
# ----------------------------------------------------------------------

_INPUTS: Final = (("begins", np.int32), ("ends", np.int32), ("letters", np.uint8))
_OUTPUTS: Final = ("token_begins", "token_ends", "tokens")
_TRUNCATE: Final = "Truncate"
_PAD: Final = "RaggedToDense"
_PAD_ID: Final = 4


@dataclass(frozen=True, slots=True)
class RaggedTokenizer:
    """A tokenizer's model, and what its caller has to add.

    The model takes ``begins`` and ``ends`` INT32 [texts], between which lie the bytes of each text in ``letters`` UINT8
    [-1], and gives ``token_begins`` and ``token_ends`` INT32 [texts] and ``tokens`` INT32 [1,-1] likewise.
    """

    model: ov.Model
    special_tokens: SpecialTokens
    pad_id: int
    pads_right: bool


def read_tokenizer(file: Path) -> RaggedTokenizer:
    """Read ``openvino_tokenizer.xml``.  Blocks for as long as that takes.

    Raises:
        ConfigError: it cannot be read, or is not of the form that ``openvino_tokenizers`` gives tokenizers.
    """
    load_tokenizer_operations()
    model = read_model(file)
    unpack = next((node for node in model.get_ordered_ops() if node.get_type_name() == "StringTensorUnpack"), None)
    pad = next((node for node in model.get_ordered_ops() if node.get_type_name() == _PAD), None)
    if unpack is None or pad is None:
        found = ", ".join(sorted({node.get_type_name() for node in model.get_ops()}))
        expected = f"the operations StringTensorUnpack and {_PAD}"
        raise ConfigError(
            [Problem("the tokenizer has a form that is not known", file=str(file), expected=expected, found=found)]
        )
    combine, tokens = _tokens(pad)
    special_tokens = read_special_tokens(model, combine)
    pad_id = int(pad.input_value(_PAD_ID).get_node().get_data().reshape(-1)[0])
    ragged = ov.Model(_named_results(tokens), _replace_inputs(unpack), "tokenizer")
    return RaggedTokenizer(ragged, special_tokens, pad_id, bool(pad.get_attributes().get("pad_right", True)))


def _tokens(pad: ov.Node) -> tuple[ov.Node | None, Sequence[ov.Output]]:
    """Find where a text's tokens come from, and what puts marks around them."""
    combine = None
    parts = [pad.input_value(number) for number in range(3)]
    while True:
        source = parts[2].get_node()
        if source.get_type_name() == COMBINE:
            combine = source
            parts = next(_open_parts(source))
        elif source.get_type_name() == _TRUNCATE:
            parts = [source.input_value(number) for number in range(3)]
        elif parts[0].get_node() != source and source.get_output_size() == len(parts):
            # Converters of earlier versions cut texts off by moving where they begin or end.
            return combine, source.outputs()
        else:
            return combine, parts


def _open_parts(combine: ov.Node) -> Iterator[list[ov.Output]]:
    for number in range(0, combine.get_input_size() - 1, 3):
        parts = [combine.input_value(number + each) for each in range(3)]
        if parts[2].get_node().get_type_name() != "Constant":
            yield parts


def _replace_inputs(unpack: ov.Node) -> list[ov.Node]:
    """Take what a tensor of strings would be unpacked to."""
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
    # Texts may have no tokens at all, and an output of no more than that dimension would look like one of a failure.
    row = op.unsqueeze(tokens[2], np.array([0]))
    for name, output in zip(_OUTPUTS, (*tokens[:2], row.output(0)), strict=True):
        output.set_names({name})
        results.append(op.result(output))
    return results
