"""Marks by which a change of what a handler is loaded from is seen: its code and its settings, not what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ovmstrio.repository.fingerprints import paths_mark
from ovmstrio.repository.graph_files import python_files

if TYPE_CHECKING:
    from pathlib import Path

    from ovmstrio.config.specs import HandlerSpec

__all__ = ["handler_mark"]

_SETTINGS: Final = (".yaml", ".yml", ".proto", ".pickle")
_DOTENV: Final = ".env"


def handler_mark(spec: HandlerSpec) -> str:
    """Give a mark of a project's files that changes when one is written, appears or goes.

    What cannot be read is a state like any other.
    """
    return paths_mark([*python_files(spec.base_path), *_settings(spec.base_path)])


def _settings(directory: Path) -> set[Path]:
    try:
        return {path for path in directory.iterdir() if path.suffix in _SETTINGS or path.name == _DOTENV}
    except OSError:
        return set()
