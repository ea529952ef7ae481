"""Conversion of a byte-level BPE ``tokenizer.json`` to OpenVINO models: ``python -m ... TABLE FOLDER``.

The result equals that of transformers with ``openvino_tokenizers``, but needs no transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import openvino as ov
from openvino_tokenizers import tokenizer_pipeline as steps
from openvino_tokenizers.constants import UTF8ReplaceMode
from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

__all__ = ["build", "write"]

_ABSENT: Final = {
    "byte_fallback": False,
    "continuing_subword_prefix": "",
    "dropout": None,
    "end_of_word_suffix": "",
    "fuse_unk": False,
    "ignore_merges": False,
    "unk_token": None,
}
_END: Final = "<|endoftext|>"


def build(table: Mapping[str, Any]) -> tuple[ov.Model, ov.Model]:
    """Build tokenizer and detokenizer: texts, STRING [-1] -> ``input_ids``, ``attention_mask`` INT64 [-1,-1], and back.

    Args:
        table: the content of ``tokenizer.json``.
    """
    # Older files omit empty fields.
    table = {**table, "model": {**_ABSENT, **table["model"]}}
    added = {token["id"]: token["content"] for token in table["added_tokens"]}
    end = next(number for number, content in added.items() if content == _END)
    pipeline = steps.TokenizerPipeline()
    pipeline.add_steps(steps.SpecialTokensSplit([steps.SpecialToken(content) for content in added.values()]))
    pipeline.add_steps([steps.RegexSplitStep.byte_level_splitter(), steps.BytesToCharsStep()])
    pipeline.add_steps(steps.BPETokenizationStep.from_hf_json(table))
    pipeline.vocab = pipeline[-1].vocab
    pipeline.add_steps(steps.CombineSegmentsStep([steps.Sequence()]))
    pipeline.add_steps(steps.PaddingStep(_END, end))
    pipeline.add_steps(
        steps.VocabDecoderStep.from_hf_json(
            tokenizer_json=table,
            pipeline_vocab=pipeline.vocab,
            skip_tokens=added,
            added_tokens=added,
            do_skip_tokens=True,
            is_byte_level=pipeline.is_byte_level,
        )
    )
    pipeline.add_steps([steps.CharsToBytesStep(), steps.UTF8ValidateStep(mode=UTF8ReplaceMode.REPLACE)])
    models: tuple[ov.Model, ov.Model] = (
        change_outputs_type(pipeline.get_tokenizer_ov_subgraph(), ov.Type.i64),
        change_inputs_type(pipeline.get_detokenizer_ov_subgraph(), ov.Type.i64),
    )
    for model in models:
        for role in ("eos_token_id", "pad_token_id", "bos_token_id"):
            model.set_rt_info(end, role)
    return models


def write(table: Path, folder: Path) -> None:
    """Write ``openvino_tokenizer.xml`` and ``openvino_detokenizer.xml``."""
    models = build(json.loads(table.read_text(encoding="utf-8")))
    for model, name in zip(models, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(model, folder / f"openvino_{name}.xml")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
