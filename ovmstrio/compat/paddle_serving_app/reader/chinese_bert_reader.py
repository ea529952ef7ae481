"""``ChineseBertReader``: BERT inputs of a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paddle_serving_app.reader.batching import pad_batch_data
from paddle_serving_app.reader.bert_base_reader import BertBaseReader
from paddle_serving_app.reader.tokenization import FullTokenizer

__all__ = ["ChineseBertReader"]

_ENDS: Final = 2


class ChineseBertReader(BertBaseReader):
    """Reader that creates ``input_ids``, ``position_ids``, ``segment_ids`` and ``input_mask`` of a sentence.

    Args:
        args: ``vocab_file``, required, and ``max_seq_len``, default 20.

    Raises:
        ValueError: ``vocab_file`` is missing.
    """

    def __init__(self, args: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        known = args or {}
        if "vocab_file" not in known:
            raise ValueError("ChineseBertReader needs {'vocab_file': 'vocab.txt'}; vocabularies are not downloaded")
        self.tokenizer = FullTokenizer(known["vocab_file"])
        self.max_seq_len: int = known.get("max_seq_len", 20)
        self.vocab = self.tokenizer.vocab
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = (
            self.vocab[f"[{name}]"] for name in ("PAD", "CLS", "SEP", "MASK")
        )
        self.feed_keys = ["input_ids", "position_ids", "segment_ids", "input_mask"]

    def process(self, line: str | bytes) -> dict[str, list[int]]:
        """Return the inputs, each with ``max_seq_len`` numbers.

        As in the original, the sentence starts with ``[CLS]``, has no final ``[SEP]``, and at most ``max_seq_len - 2``
        pieces.
        """
        pieces = self.tokenizer.tokenize(line)[: self.max_seq_len - _ENDS]
        tokens = self.tokenizer.convert_tokens_to_ids(["[CLS]", *pieces])
        filled, mask = self._pad(tokens, return_input_mask=True)
        positions, segments = self._pad(range(len(tokens))), self._pad([0] * len(tokens))
        inputs = (filled, positions, segments, mask)
        return {key: each.reshape(-1).tolist() for key, each in zip(self.feed_keys, inputs, strict=True)}

    def _pad(self, numbers: Any, *, return_input_mask: bool = False) -> Any:
        return pad_batch_data(
            [numbers], pad_idx=self.pad_id, max_seq_len=self.max_seq_len, return_input_mask=return_input_mask
        )
