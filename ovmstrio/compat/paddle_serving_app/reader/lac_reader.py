"""``LACReader``: character numbers of Chinese text, and words from a model's tags."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["LACReader", "load_kv_dict"]


def load_kv_dict(
    dict_path: str | Path,
    reverse: bool = False,
    delimiter: str = "\t",
    key_func: Callable[[str], Any] | None = None,
    value_func: Callable[[str], Any] | None = None,
) -> dict[Any, Any]:
    """Read key-value pairs, one per line; other lines are skipped.

    Raises:
        KeyError: a key is repeated.
    """
    found: dict[Any, Any] = {}
    for line in Path(dict_path).read_text(encoding="utf-8").split("\n"):
        terms = line.split(delimiter)
        if len(terms) != 2:  # noqa: PLR2004 - a pair
            continue
        key, value = reversed(terms) if reverse else terms
        if key in found:
            raise KeyError(f"{dict_path} has the key {key!r} twice")
        found[key_func(key) if key_func else key] = value_func(value) if value_func else value
    return found


class LACReader:
    """Reader with the dictionaries ``word.dic``, ``tag.dic`` and ``q2b.dic`` of a folder, which is not downloaded.

    Raises:
        FileNotFoundError: a dictionary is missing.
    """

    def __init__(self, dict_folder: str = "") -> None:
        folder = Path(dict_folder or "lac_dict")
        if not folder.is_dir():
            raise FileNotFoundError(f"LACReader needs the folder {folder} with word.dic, tag.dic and q2b.dic")
        words, tags = folder / "word.dic", folder / "tag.dic"
        self.word2id_dict: dict[str, int] = load_kv_dict(words, reverse=True, value_func=int)
        self.id2word_dict: dict[str, str] = load_kv_dict(words)
        self.label2id_dict: dict[str, int] = load_kv_dict(tags, reverse=True, value_func=int)
        self.id2label_dict: dict[str, str] = load_kv_dict(tags)
        self.word_replace_dict: dict[str, str] = load_kv_dict(folder / "q2b.dic")

    @property
    def vocab_size(self) -> int:
        """Largest character number plus one."""
        return max(self.word2id_dict.values()) + 1

    @property
    def num_labels(self) -> int:
        """Largest tag number plus one."""
        return max(self.label2id_dict.values()) + 1

    def word_to_ids(self, words: str | bytes) -> list[int]:
        """Return the numbers of characters, after replacement of full-width forms."""
        plain = (self.word_replace_dict.get(character, character) for character in _text(words))
        unknown = self.word2id_dict["OOV"]
        return [self.word2id_dict.get(character, unknown) for character in plain]

    def label_to_ids(self, labels: Iterable[str]) -> list[int]:
        """Return the numbers of tags."""
        return [self.label2id_dict.get(label, self.label2id_dict["O"]) for label in labels]

    def process(self, sent: str | bytes) -> list[int]:
        """Return the character numbers of a stripped sentence."""
        return self.word_to_ids(_text(sent).strip())

    def parse_result(self, words: str | bytes, crf_decode: Iterable[Any]) -> list[str]:
        """Return the words of a sentence from rows of tag numbers, one per character.

        A word starts at each tag ending in ``-B``, and at the first ``O`` after another tag.
        """
        tags = [self.id2label_dict[str(int(row[0]))] for row in crf_decode]
        found: list[str] = []
        for position, (character, tag) in enumerate(zip(_text(words), tags, strict=False)):
            if position == 0 or tag.endswith("-B") or (tag == "O" and tags[position - 1] != "O"):
                found.append("")
            found[-1] += character
        return found


def _text(words: str | bytes) -> str:
    return words.decode("utf-8") if isinstance(words, bytes) else words
