"""BERT tokenizers: text to words, and words to vocabulary pieces."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

__all__ = [
    "BasicTokenizer",
    "CharTokenizer",
    "FullTokenizer",
    "WordpieceTokenizer",
    "convert_by_vocab",
    "convert_ids_to_tokens",
    "convert_to_unicode",
    "convert_tokens_to_ids",
    "load_vocab",
    "printable_text",
    "whitespace_tokenize",
]

_K = TypeVar("_K")
_V = TypeVar("_V")

_IDEOGRAPHS: Final = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
_ASCII_PUNCTUATION: Final = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
_WORD_START: Final = "\u2581"


def convert_to_unicode(text: str | bytes) -> str:
    """Return text, decoded from UTF-8 without invalid bytes.

    Raises:
        ValueError: the argument is neither ``str`` nor ``bytes``.
    """
    if isinstance(text, bytes):
        return text.decode("utf-8", "ignore")
    if not isinstance(text, str):
        raise ValueError(f"text must be str or bytes, got {type(text).__name__}")  # noqa: TRY004 - as the original
    return text


printable_text = convert_to_unicode


def load_vocab(vocab_file: str | Path) -> dict[str, int]:
    """Read tokens, one per line, with numbers after a tab or else the line numbers."""
    found: dict[str, int] = {}
    with Path(vocab_file).open(encoding="utf-8") as file:
        for line_number, line in enumerate(file):
            token, *numbers = line.strip().split("\t")
            if len(numbers) > 1:
                break
            found[token.strip()] = int(numbers[0]) if numbers else line_number
    return found


def convert_by_vocab(vocab: Mapping[_K, _V], items: Iterable[_K]) -> list[_V]:
    """Return the values of items; unknown items raise ``KeyError``."""
    return [vocab[item] for item in items]


convert_tokens_to_ids = convert_by_vocab
convert_ids_to_tokens = convert_by_vocab


def whitespace_tokenize(text: str) -> list[str]:
    """Split at white space."""
    return text.split()


class BasicTokenizer:
    """Splitter of text into words, punctuation and ideographs; optionally lower case without accents."""

    def __init__(self, do_lower_case: bool = True) -> None:
        self.do_lower_case = do_lower_case

    def tokenize(self, text: str | bytes) -> list[str]:
        """Return the words."""
        spaced = "".join(map(_space_out, convert_to_unicode(text)))
        words = (_without_accents(word.lower()) if self.do_lower_case else word for word in spaced.split())
        return " ".join(part for word in words for part in _split_punctuation(word)).split()


class WordpieceTokenizer:
    """Splitter of words into the longest vocabulary pieces, from the left."""

    def __init__(
        self,
        vocab: Mapping[str, int],
        unk_token: str = "[UNK]",  # noqa: S107 - no password
        max_input_chars_per_word: int = 100,
        use_sentence_piece_vocab: bool = False,
    ) -> None:
        self.vocab = vocab
        self.unk_token = unk_token
        self.max_input_chars_per_word = max_input_chars_per_word
        self.use_sentence_piece_vocab = use_sentence_piece_vocab

    def tokenize(self, text: str | bytes) -> list[str]:
        """Return the pieces; inner pieces start with ``##``, and a word without pieces is unknown."""
        return [piece for word in convert_to_unicode(text).split() for piece in self._pieces(word)]

    def _pieces(self, word: str) -> list[str]:
        found: list[str] = []
        start = 0
        while start < len(word) <= self.max_input_chars_per_word:
            ends = range(len(word), start, -1)
            end = next((end for end in ends if self._piece(word, start, end) in self.vocab), None)
            if end is None:
                break
            found.append(self._piece(word, start, end))
            start = end
        return found if start == len(word) else [self.unk_token]

    def _piece(self, word: str, start: int, end: int) -> str:
        if self.use_sentence_piece_vocab:
            return word[start:end] if start else _WORD_START + word[:end]
        return f"##{word[start:end]}" if start else word[:end]


class _Vocabulary:
    def __init__(self, vocab_file: str | Path) -> None:
        self.vocab = load_vocab(vocab_file)
        self.inv_vocab = {number: token for token, number in self.vocab.items()}

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int]:
        return convert_by_vocab(self.vocab, tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        return convert_by_vocab(self.inv_vocab, ids)


class FullTokenizer(_Vocabulary):
    """Splitter of text into words and words into pieces."""

    def __init__(
        self, vocab_file: str | Path, do_lower_case: bool = True, use_sentence_piece_vocab: bool = False
    ) -> None:  # fmt: skip
        super().__init__(vocab_file)
        self.use_sentence_piece_vocab = use_sentence_piece_vocab
        self.basic_tokenizer = BasicTokenizer(do_lower_case)
        self.wordpiece_tokenizer = WordpieceTokenizer(self.vocab, use_sentence_piece_vocab=use_sentence_piece_vocab)

    def tokenize(self, text: str | bytes) -> list[str]:
        """Return the pieces."""
        words = self.basic_tokenizer.tokenize(text)
        return [piece for word in words for piece in self.wordpiece_tokenizer.tokenize(word)]


class CharTokenizer(_Vocabulary):
    """Splitter of lower-case text at spaces and words into pieces."""

    def __init__(self, vocab_file: str | Path, do_lower_case: bool = True) -> None:
        super().__init__(vocab_file)
        self.wordpiece_tokenizer = WordpieceTokenizer(self.vocab)

    def tokenize(self, text: str) -> list[str]:
        """Return the pieces."""
        return [piece for word in text.lower().split(" ") for piece in self.wordpiece_tokenizer.tokenize(word)]


def _space_out(character: str) -> str:
    """Return a space for white space, nothing for controls, and ideographs between spaces."""
    if character in "\t\n\r" or unicodedata.category(character) == "Zs":
        return " "
    if character == "\ufffd" or unicodedata.category(character).startswith("C"):
        return ""
    is_ideograph = any(first <= ord(character) <= last for first, last in _IDEOGRAPHS)
    return f" {character} " if is_ideograph else character


def _without_accents(word: str) -> str:
    return "".join(each for each in unicodedata.normalize("NFD", word) if unicodedata.category(each) != "Mn")


def _split_punctuation(word: str) -> Iterator[str]:
    part = ""
    for character in word:
        if character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P"):
            yield from (part, character)
            part = ""
        else:
            part += character
    yield part
