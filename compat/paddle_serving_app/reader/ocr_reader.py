"""``OCRReader``: inputs and outputs of text recognition models."""

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
_PROBABILITIES: Final = "softmax_0.tmp_0"
_OCRV2_OUTPUT: Final = "save_infer_model/scale_0.tmp_1"
_WIDTH_PER_RATIO: Final = 32
_RANK: Final = 3


class OCRReader:
    """Pre- and postprocessing of text lines.

    Args:
        algorithm: ignored, as in the original.
        image_shape: channels, height and width of the model's input; for ``ch`` the width depends on the lines.
        char_type: character type of ``CTCLabelDecode`` and ``CharacterOps``.
        batch_num: ignored.
        char_dict_path: character dictionary.
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
        """Convert a line [height, width, 3] to an input [3, height, width] between -1 and 1, zero-padded at the right.

        Args:
            img: the line.
            max_wh_ratio: largest ratio of width to height in the batch, which sets the width for ``ch``.
        """
        channels, height, width = self.rec_image_shape
        if self.character_type == "ch":
            width = int(_WIDTH_PER_RATIO * max_wh_ratio)
        used = min(width, math.ceil(height * (img.shape[1] / img.shape[0])))
        result = np.zeros((channels, height, width), np.float32)
        line = np.asarray(cv2.resize(img, (used, height))).astype(np.float32).transpose(2, 0, 1)
        result[:, :, :used] = (line / 255 - 0.5) / 0.5
        return result

    def preprocess(self, img_list: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Return the input of the first line, wide enough for the longest line."""
        longest = max((img.shape[1] / img.shape[0] for img in img_list), default=0)
        return self.resize_norm_img(img_list[0], longest)

    def postprocess(self, outputs: Mapping[str, Any], with_score: bool = False) -> list[list[Any]]:
        """Return the text of each line, and optionally its score, for a model with a greedy decoder."""
        classes = np.asarray(outputs[_CLASSES])
        texts = [self.char_ops.decode(classes[rows, 0]) for rows in _lines(outputs[f"{_CLASSES}.lod"])]
        if not with_score:
            return [[text] for text in texts]
        probabilities = np.asarray(outputs[_PROBABILITIES], np.float32)
        scores = [_score(probabilities[rows]) for rows in _lines(outputs[f"{_PROBABILITIES}.lod"])]
        return [[text, score] for text, score in zip(texts, scores, strict=True)]

    def postprocess_ocrv2(self, outputs: Mapping[str, Any], with_score: bool = False) -> list[tuple[str, Any]]:
        """Return text and score of each line from probabilities [lines, steps, classes].

        The input is the output with Paddle's name, or the only one with three dimensions.

        Raises:
            ValueError: there is no such output.
        """
        output = outputs.get(_OCRV2_OUTPUT)
        if output is None:
            others = [value for value in outputs.values() if np.ndim(value) == _RANK]
            if len(others) != 1:
                raise ValueError(f"one output must be [lines, steps, classes], got {', '.join(outputs) or 'none'}")
            (output,) = others
        text: list[tuple[str, Any]] = self.label_ops(np.asarray(output))
        return text


def _lines(offsets: Any) -> list[slice]:
    """Return the rows of each line."""
    return [slice(start, end) for start, end in pairwise(np.asarray(offsets).reshape(-1).tolist())]


def _score(probabilities: NDArray[np.float32]) -> Any:
    """Return the mean probability of a line's characters; the last class is the blank."""
    read = probabilities.argmax(1) != probabilities.shape[1] - 1
    return probabilities.max(1)[read].mean() if read.any() else np.float32(np.nan)
