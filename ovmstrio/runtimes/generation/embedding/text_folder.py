"""What a folder of Optimum's says of its model: how long texts may be, and which tokens there are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.regular_files import read_regular_text

__all__ = ["TextFolder", "read_text_folder"]

MODEL: Final = "openvino_model.xml"
TOKENIZER: Final = "openvino_tokenizer.xml"
_CONFIG: Final = "config.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_WAY_OUT: Final = (
    "export the model with optimum-intel, which writes it, or convert the tokenizer with openvino_tokenizers"
)
_LONGEST: Final = 2**20
"""Above any model's length stands a number for none."""
_COUNTED_FROM_PADDING: Final = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet"})
"""Architectures that have positions for padding, two of them, which no text may use."""


@dataclass(frozen=True, slots=True)
class TextFolder:
    """The files of a model, and what they say.

    Attributes:
        max_length: how many tokens a text may have, those around it included; None where nobody says.
        vocabulary_size: below which number all tokens are; None where nobody says.
        cuts_left: whether what is too long loses its begin, rather than its end.
    """

    model: Path
    tokenizer: Path
    max_length: int | None
    vocabulary_size: int | None
    cuts_left: bool


def read_text_folder(folder: Path) -> TextFolder:
    """Read it; blocking.

    Raises:
        ConfigError: a file is missing, or is no JSON; all that is wrong is told.
    """
    problems = [
        Problem(f"{name} is missing", file=str(folder), suggestion=_WAY_OUT)
        for name in (MODEL, TOKENIZER)
        if not (folder / name).is_file()
    ]
    config = _read(folder / _CONFIG, problems)
    tokenizer = _read(folder / _TOKENIZER_CONFIG, problems)
    if problems:
        raise ConfigError(problems)
    return TextFolder(
        folder / MODEL,
        folder / TOKENIZER,
        _max_length(config, tokenizer),
        _size(config.get("vocab_size")),
        tokenizer.get("truncation_side") == "left",
    )


def _read(path: Path, problems: list[Problem]) -> Mapping[str, Any]:
    """Read a file of JSON that need not be there."""
    try:
        read = json.loads(read_regular_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(Problem(f"the file cannot be read: {error}", file=str(path)))
        return {}
    if isinstance(read, dict):
        return read
    problems.append(Problem("the file holds something else", file=str(path), expected="a JSON object"))
    return {}


def _max_length(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int | None:
    positions = _size(config.get("max_position_embeddings"))
    if positions is not None and config.get("model_type") in _COUNTED_FROM_PADDING:
        positions = max(1, positions - 2)
    known = [each for each in (positions, _size(tokenizer.get("model_max_length"))) if each is not None]
    return min(known, default=None)


def _size(value: Any) -> int | None:
    is_size = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST
    return int(value) if is_size else None
