"""A tiny language model with an EAGLE-3 draft model; ``tests/data/make_tiny_eagle3.py`` made them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from tests.support.archives import unpack
from tests.support.tiny_llm import write_tiny_folder

_ARCHIVE: Final = Path(__file__).parents[1] / "data" / "tiny_eagle3.tar.xz"


def write_tiny_eagle3(directory: Path) -> tuple[Path, Path]:
    """Write the folders of the model and of its draft model, which has no tokenizer; return them."""
    unpack(_ARCHIVE, directory)
    target, draft = directory / "target", directory / "draft"
    for file in write_tiny_folder(directory / "tokenizer").glob("openvino_*tokenizer.*"):
        shutil.copy(file, target)
    return target, draft
