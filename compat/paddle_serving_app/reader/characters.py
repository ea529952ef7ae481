"""The characters that classes of a model stand for, and text out of classes."""

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
_OF_DICTIONARIES: Final = frozenset({
    "ch", "chinese_cht", "EN", "french", "german", "japan", "korean", "it", "xi", "pu", "ru", "ar", "ta", "ug", "fa",
    "ur", "rs", "oc", "rsc", "bg", "uk", "be", "te", "ka", "hi", "mr", "ne",
})  # fmt: skip


def _characters(file: str | Path) -> str:
    """Read a dictionary of characters, one a line; a line of several has as many."""
    return "".join(Path(file).read_text(encoding="utf-8").split("\n")).replace("\r", "")


class CharacterOps:
    """Turns text into classes and back.

    Args:
        config: ``character_type`` is ``en``, ``en_sensitive`` or ``ch``, which has a ``character_dict_path``;
            ``loss_type`` is ``ctc``, with the blank behind all characters, or ``attention``, with two ends before them.

    Raises:
        ValueError: the type is none of these.
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
        """Give the classes of the characters that are known."""
        known = text.lower() if self.character_type == "en" else text
        return np.array([self.dict[character] for character in known if character in self.dict], np.int64)

    def decode(self, text_index: Any, is_remove_duplicate: bool = False) -> str:
        """Spell classes, without ends or blanks, and without repetitions if they are to go."""
        ignored = {0, 1} if self.loss_type == "attention" else {self.get_char_num()}
        kept = _kept(np.asarray(text_index).reshape(-1), ignored, is_remove_duplicate)
        return "".join(self.character[number] for _, number in kept)

    def get_char_num(self) -> int:
        """Give the number of classes without the blank."""
        return len(self.character)

    def get_beg_end_flag_idx(self, beg_or_end: str) -> NDArray[np.int64]:
        """Give the class of an end.

        Raises:
            ValueError: it is neither ``beg`` nor ``end``, or the classes have none.
        """
        ends = {"beg": self.beg_str, "end": self.end_str} if self.loss_type == "attention" else {}
        if beg_or_end not in ends:
            raise ValueError(f"classes of {self.loss_type!r} have the ends {sorted(ends)}, got {beg_or_end!r}")
        return np.array(self.dict[ends[beg_or_end]])


class BaseRecLabelDecode:
    """Turns the classes of models into text, of which the first is no character.

    Args:
        config: ``character_type``: ``en`` and ``EN_symbol`` have characters of their own, languages those of the file
            ``character_dict_path``, and a space.

    Raises:
        ValueError: the type is unknown, or has no file.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.character_type: str = config["character_type"]
        file = config.get("character_dict_path")
        self.beg_str, self.end_str = _ENDS
        if self.character_type in {"en", "EN_symbol"}:
            self.character_str = _ALPHANUMERIC if self.character_type == "en" else _PRINTABLE
        elif self.character_type not in _OF_DICTIONARIES:
            known = ", ".join(sorted({*_OF_DICTIONARIES, "en", "EN_symbol"}))
            raise ValueError(f"character_type must be one of {known}, got {self.character_type!r}")
        elif file is None:
            raise ValueError(f"character_type {self.character_type!r} needs character_dict_path")
        else:
            self.character_str = f"{_characters(file)} "
        self.character = self.add_special_char(list(self.character_str))
        self.dict = {character: number for number, character in enumerate(self.character)}

    def add_special_char(self, dict_character: list[str]) -> list[str]:
        """Add classes that are no characters."""
        return dict_character

    def get_ignored_tokens(self) -> list[int]:
        """Give the classes that are not spelled."""
        return [0]

    def decode(
        self, text_index: Any, text_prob: Any = None, is_remove_duplicate: bool = False
    ) -> list[tuple[str, Any]]:  # fmt: skip
        """Spell each row of classes; with the average of what its characters have in ``text_prob``, NaN for no text."""
        found: list[tuple[str, Any]] = []
        for row, numbers in enumerate(np.asarray(text_index)):
            kept = _kept(numbers, set(self.get_ignored_tokens()), is_remove_duplicate)
            likely = [1 if text_prob is None else text_prob[row][place] for place, _ in kept]
            text = "".join(self.character[number] for _, number in kept)
            found.append((text, np.mean(likely) if likely else np.nan))
        return found


class CTCLabelDecode(BaseRecLabelDecode):
    """Turns likelihoods [batch, steps, classes] into text; the first class is the blank."""

    def __init__(self, config: Mapping[str, Any], **_: Any) -> None:
        super().__init__(config)

    def __call__(self, preds: NDArray[Any], label: Any = None) -> Any:
        """Give text and score of each row; and those of the labels, if there are any."""
        text = self.decode(preds.argmax(2), preds.max(2), is_remove_duplicate=True)
        return text if label is None else (text, self.decode(label))

    def add_special_char(self, dict_character: list[str]) -> list[str]:
        """Add the blank."""
        return [_BLANK, *dict_character]


def _kept(numbers: Sequence[Any] | NDArray[Any], ignored: set[int], once: bool) -> list[tuple[int, int]]:
    """Give place and class of what is spelled."""
    classes = [int(number) for number in numbers]
    return [
        (place, number)
        for place, number in enumerate(classes)
        if number not in ignored and not (once and place > 0 and classes[place - 1] == number)
    ]
