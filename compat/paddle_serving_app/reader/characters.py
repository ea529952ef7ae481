"""Character sets of text recognition models, and decoding of classes to text."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BaseRecLabelDecode", "CTCLabelDecode", "CharacterOps"]

_ALPHANUMERIC: Final = string.digits + string.ascii_lowercase
_PRINTABLE: Final = string.printable[:-6]
_BLANK: Final = "blank"
_ENDS: Final = ("sos", "eos")
_DICTIONARY_TYPES: Final = frozenset({
    "ch", "chinese_cht", "EN", "french", "german", "japan", "korean", "it", "xi", "pu", "ru", "ar", "ta", "ug", "fa",
    "ur", "rs", "oc", "rsc", "bg", "uk", "be", "te", "ka", "hi", "mr", "ne",
})  # fmt: skip


def _characters(file: str | Path) -> str:
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
    classes = [int(number) for number in numbers]
    return [
        (place, number)
        for place, number in enumerate(classes)
        if number not in ignored and not (once and place > 0 and classes[place - 1] == number)
    ]
