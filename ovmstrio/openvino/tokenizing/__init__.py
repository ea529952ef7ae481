"""Tokenizers as OpenVINO models: texts in, numbers of tokens out, without padding and without the marks around them.

::

    openvino_tokenizer.xml ─> read_tokenizer ─> RaggedTokenizer ─┬─> model: bytes of texts -> their tokens
                                                                 └─> special tokens: what stands around texts and pairs
"""

from ovmstrio.openvino.tokenizing.ragged_tokenizer import RaggedTokenizer, read_tokenizer
from ovmstrio.openvino.tokenizing.special_tokens import SpecialTokens, Template

__all__ = ["RaggedTokenizer", "SpecialTokens", "Template", "read_tokenizer"]
