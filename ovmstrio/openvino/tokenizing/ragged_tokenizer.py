"""A tokenizer that was converted for OpenVINO, cut down to what every text needs: bytes in, tokens out.

What the converted model does before that (take strings) and behind it (cut off, add marks, pad) is left out, so that
texts of any lengths take no more memory than they have bytes and tokens, and each caller may have its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.openvino.reading import read_model
from ovmstrio.openvino.tokenizing.extension import load_tokenizer_operations
from ovmstrio.openvino.tokenizing.special_tokens import COMBINE, SpecialTokens, read_special_tokens

__all__ = ["RaggedTokenizer", "read_tokenizer"]

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
