"""Conversion of BERT's ``tokenizer.json`` to an OpenVINO model: ``python -m ... TABLE FOLDER``.

The result equals that of transformers with ``openvino_tokenizers``, but needs no transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openvino as ov
from openvino_tokenizers import tokenizer_pipeline as steps

__all__ = ["build", "write"]


def build(table: Mapping[str, Any], longest: int) -> ov.Model:
    """Build the model: texts, STRING [-1] -> ``input_ids``, ``token_type_ids``, ``attention_mask`` INT64 [-1,-1].

    Args:
        table: the content of ``tokenizer.json``.
        longest: the maximum number of tokens of a text, for callers that enable truncation.
    """
    numbers: Mapping[str, int] = table["model"]["vocab"]
    pipeline = steps.TokenizerPipeline()
    pipeline.add_steps(
        steps.SpecialTokensSplit([steps.SpecialToken(token["content"]) for token in table["added_tokens"]])
    )
    pipeline.add_steps(
        [
            steps.RegexNormalizationStep.del_control_chars_regex(),
            steps.RegexNormalizationStep.replace_whitespace_regex(),
            steps.RegexNormalizationStep.handle_chinese_chars_regex(),
            steps.NormalizeUnicode("NFD"),
            steps.RegexNormalizationStep.strip_accents_regex(),
            steps.CaseFoldStep(),
            *steps.RegexSplitStep.bert_splitter(),
        ]
    )
    pipeline.add_steps(steps.WordPieceTokenizationStep.from_hf_json(table))
    pipeline.vocab = pipeline[-1].vocab
    marks = [steps.AddToken(token=token, _token_id=numbers[token], token_type_id=0) for token in ("[CLS]", "[SEP]")]
    pipeline.add_steps(steps.TruncationStep(max_length=longest - len(marks)))
    pipeline.add_steps(steps.CombineSegmentsStep([marks[0], steps.Sequence(token_type_id=0), marks[1]]))
    pipeline.add_steps(steps.PaddingStep("[PAD]", numbers["[PAD]"]))
    model: ov.Model = pipeline.get_tokenizer_ov_subgraph()
    begin, end = numbers["[CLS]"], numbers["[SEP]"]
    templates = {
        "single": {"ids": [begin, -1, end], "type_ids": [0, 0, 0]},
        "pair": {"ids": [begin, -1, end, -2, end], "type_ids": [0, 0, 0, 1, 1]},
    }
    model.set_rt_info(json.dumps(templates), "processed_post_processor_template")
    return model


def write(table: Path, folder: Path, longest: int = 512) -> None:
    """Write ``openvino_tokenizer.xml``."""
    model = build(json.loads(table.read_text(encoding="utf-8")), longest)
    ov.save_model(model, folder / "openvino_tokenizer.xml")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
