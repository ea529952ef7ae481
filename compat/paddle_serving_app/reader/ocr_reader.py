"""``OCRReader``: images of lines into inputs of models that read them, and their outputs into text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.characters import BaseRecLabelDecode, CharacterOps, CTCLabelDecode
from paddle_serving_app.reader.opencv import cv2

__all__ = ["BaseRecLabelDecode", "CTCLabelDecode", "CharacterOps", "OCRReader"]

_CLASSES: Final = "ctc_greedy_decoder_0.tmp_0"
_LIKELY: Final = "softmax_0.tmp_0"
_SECOND: Final = "save_infer_model/scale_0.tmp_1"
_WIDENING_BY: Final = 32
_RANK: Final = 3


class OCRReader:
    """Reads lines of text.

    Args:
        algorithm: taken, and not used, as by the original.
        image_shape: channels, height and width of the model's input; the width of ``ch`` follows the lines.
        char_type: what the model's classes are, as ``CTCLabelDecode`` and ``CharacterOps`` know it.
        batch_num: taken, and not used.
        char_dict_path: the file of characters.
    """

    def __init__(
        self,
        algorithm: str = "CRNN",
        image_shape: Sequence[int] = (3, 32, 320),
        char_type: str = "ch",
        batch_num: int = 1,
        char_dict_path: str = "./ppocr_keys_v1.txt",
    ) -> None:
        self.rec_image_shape = image_shape
        self.character_type = char_type
        self.rec_batch_num = batch_num
        config = {"character_type": char_type, "character_dict_path": char_dict_path, "loss_type": "ctc"}
        self.char_ops = CharacterOps(config)
        self.label_ops = CTCLabelDecode(config)

    def resize_norm_img(self, img: NDArray[Any], max_wh_ratio: float) -> NDArray[np.float32]:
        """Make a line [height, width, 3] an input [3, height, width] between -1 and 1, with zeros behind its end.

        Args:
            img: the line.
            max_wh_ratio: width to height of the longest line of a batch, which makes the width for ``ch``.
        """
        channels, height, width = self.rec_image_shape
        if self.character_type == "ch":
            width = int(_WIDENING_BY * max_wh_ratio)
        used = min(width, math.ceil(height * (img.shape[1] / img.shape[0])))
        result = np.zeros((channels, height, width), np.float32)
        line = np.asarray(cv2.resize(img, (used, height))).astype(np.float32).transpose(2, 0, 1)
        result[:, :, :used] = (line / 255 - 0.5) / 0.5
        return result

    def preprocess(self, img_list: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Give the input of the first line, as wide as the longest needs."""
        longest = max((img.shape[1] / img.shape[0] for img in img_list), default=0)
        return self.resize_norm_img(img_list[0], longest)

    def postprocess(self, outputs: Mapping[str, Any], with_score: bool = False) -> list[list[Any]]:
        """Spell what a model with a greedy decoder inside has read: text, and its score if asked, for each line."""
        classes = np.asarray(outputs[_CLASSES])
        texts = [self.char_ops.decode(classes[rows, 0]) for rows in _lines(outputs[f"{_CLASSES}.lod"])]
        if not with_score:
            return [[text] for text in texts]
        likely = np.asarray(outputs[_LIKELY], np.float32)
        scores = [_score(likely[rows]) for rows in _lines(outputs[f"{_LIKELY}.lod"])]
        return [[text, score] for text, score in zip(texts, scores, strict=True)]

    def postprocess_ocrv2(self, outputs: Mapping[str, Any], with_score: bool = False) -> list[tuple[str, Any]]:
        """Spell likelihoods [lines, steps, classes]: text and score of each line.

        They are the output of the name that Paddle gives, or the only one of three dimensions.

        Raises:
            ValueError: there is no such output.
        """
        found = outputs.get(_SECOND)
        if found is None:
            others = [value for value in outputs.values() if np.ndim(value) == _RANK]
            if len(others) != 1:
                raise ValueError(f"one output must be [lines, steps, classes], got {', '.join(outputs) or 'none'}")
            (found,) = others
        text: list[tuple[str, Any]] = self.label_ops(np.asarray(found))
        return text


def _lines(offsets: Any) -> list[slice]:
    """Give the rows of each line."""
    return [slice(start, end) for start, end in pairwise(np.asarray(offsets).reshape(-1).tolist())]


def _score(likely: NDArray[np.float32]) -> Any:
    """Give how likely a line's characters are on the average; the last class is no character."""
    read = likely.argmax(1) != likely.shape[1] - 1
    return likely.max(1)[read].mean() if read.any() else np.float32(np.nan)
