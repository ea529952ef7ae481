"""``OCRReader``: inputs and outputs of text recognition models, and decoding of their classes to text."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paddle_serving_app.reader.opencv import cv2

__all__ = ["BaseRecLabelDecode", "CTCLabelDecode", "CharacterOps", "OCRReader"]

# Characters


_ALPHANUMERIC: Final = string.digits + string.ascii_lowercase
_PRINTABLE: Final = string.printable[:-6]
_BLANK: Final = "blank"
_ENDS: Final = ("sos", "eos")
_DICTIONARY_TYPES: Final = frozenset({
    "ch", "chinese_cht", "EN", "french", "german", "japan", "korean", "it", "xi", "pu", "ru", "ar", "ta", "ug", "fa",
    "ur", "rs", "oc", "rsc", "bg", "uk", "be", "te", "ka", "hi", "mr", "ne",
})  # fmt: skip


def _characters(file: str | Path) -> str:
    """Read a character dictionary; a line may have several characters."""
    return "".join(Path(file).read_text(encoding="utf-8").split("\n")).replace("\r", "")


class CharacterOps:
    """Encoder and decoder between text and classes.

    Args:
        config: ``character_type`` is ``en``, ``en_sensitive``, or ``ch`` with a ``character_dict_path``.
            ``loss_type`` is ``ctc`` with the blank last, or ``attention`` with two end classes first.

    Raises:
        ValueError: the type is unknown.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.character_type: str = config["character_type"]
        self.loss_type: str = config["loss_type"]
        self.beg_str, self.end_str = _ENDS
        if self.character_type == "ch":
            self.character_str = _characters(config["character_dict_path"])
        elif self.character_type in {"en", "en_sensitive"}:
            self.character_str = _ALPHANUMERIC if self.character_type == "en" else _PRINTABLE
        else:
            raise ValueError(f"character_type must be ch, en or en_sensitive, got {self.character_type!r}")
        ends = list(_ENDS) if self.loss_type == "attention" else []
        self.character = [*ends, *self.character_str]
        self.dict = {character: number for number, character in enumerate(self.character)}

    def encode(self, text: str) -> NDArray[np.int64]:
        """Return the classes of the known characters."""
        known = text.lower() if self.character_type == "en" else text
        return np.array([self.dict[character] for character in known if character in self.dict], np.int64)

    def decode(self, text_index: Any, is_remove_duplicate: bool = False) -> str:
        """Return the text of classes without ends and blanks, optionally without repetitions."""
        ignored = {0, 1} if self.loss_type == "attention" else {self.get_char_num()}
        kept = _kept(np.asarray(text_index).reshape(-1), ignored, is_remove_duplicate)
        return "".join(self.character[number] for _, number in kept)

    def get_char_num(self) -> int:
        """Return the number of classes without the blank."""
        return len(self.character)

    def get_beg_end_flag_idx(self, beg_or_end: str) -> NDArray[np.int64]:
        """Return the class of an end.

        Raises:
            ValueError: the argument is neither ``beg`` nor ``end``, or there are no end classes.
        """
        ends = {"beg": self.beg_str, "end": self.end_str} if self.loss_type == "attention" else {}
        if beg_or_end not in ends:
            raise ValueError(f"classes of {self.loss_type!r} have the ends {sorted(ends)}, got {beg_or_end!r}")
        return np.array(self.dict[ends[beg_or_end]])


class BaseRecLabelDecode:
    """Decoder of model classes to text; class 0 is not a character.

    Args:
        config: ``character_type`` is ``en``, ``EN_symbol``, or a language with a ``character_dict_path``, to which
            a space is added.

    Raises:
        ValueError: the type is unknown, or has no file.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.character_type: str = config["character_type"]
        file = config.get("character_dict_path")
        self.beg_str, self.end_str = _ENDS
        if self.character_type in {"en", "EN_symbol"}:
            self.character_str = _ALPHANUMERIC if self.character_type == "en" else _PRINTABLE
        elif self.character_type not in _DICTIONARY_TYPES:
            known = ", ".join(sorted({*_DICTIONARY_TYPES, "en", "EN_symbol"}))
            raise ValueError(f"character_type must be one of {known}, got {self.character_type!r}")
        elif file is None:
            raise ValueError(f"character_type {self.character_type!r} needs character_dict_path")
        else:
            self.character_str = f"{_characters(file)} "
        self.character = self.add_special_char(list(self.character_str))
        self.dict = {character: number for number, character in enumerate(self.character)}

    def add_special_char(self, dict_character: list[str]) -> list[str]:
        """Return the characters with special classes added."""
        return dict_character

    def get_ignored_tokens(self) -> list[int]:
        """Return the classes that are not characters."""
        return [0]

    def decode(
        self, text_index: Any, text_prob: Any = None, is_remove_duplicate: bool = False
    ) -> list[tuple[str, Any]]:  # fmt: skip
        """Return the text of each row of classes, and the mean of its ``text_prob``, NaN for empty text."""
        decoded: list[tuple[str, Any]] = []
        for row, numbers in enumerate(np.asarray(text_index)):
            kept = _kept(numbers, set(self.get_ignored_tokens()), is_remove_duplicate)
            probabilities = [1 if text_prob is None else text_prob[row][place] for place, _ in kept]
            text = "".join(self.character[number] for _, number in kept)
            decoded.append((text, np.mean(probabilities) if probabilities else np.nan))
        return decoded


class CTCLabelDecode(BaseRecLabelDecode):
    """Decoder of probabilities [batch, steps, classes]; class 0 is the blank."""

    def __init__(self, config: Mapping[str, Any], **_: Any) -> None:
        super().__init__(config)

    def __call__(self, preds: NDArray[Any], label: Any = None) -> Any:
        text = self.decode(preds.argmax(2), preds.max(2), is_remove_duplicate=True)
        return text if label is None else (text, self.decode(label))

    def add_special_char(self, dict_character: list[str]) -> list[str]:
        """Prepend the blank."""
        return [_BLANK, *dict_character]


def _kept(numbers: Sequence[Any] | NDArray[Any], ignored: set[int], once: bool) -> list[tuple[int, int]]:
    """Return position and class of each decoded character."""
    classes = [int(number) for number in numbers]
    return [
        (place, number)
        for place, number in enumerate(classes)
        if number not in ignored and not (once and place > 0 and classes[place - 1] == number)
    ]


# Reader


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
