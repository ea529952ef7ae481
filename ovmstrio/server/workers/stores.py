"""Where each of several processes keeps its sequences from one start to the next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.models.sequences.store import STORE_FILE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_store", "kept_counts", "part_of_store"]

_PART: Final = re.compile(r"worker-[0-9]+-of-([0-9]+)")


def part_of_store(folder: Path, row: int, rows: int) -> Path:
    """Give the folder of one of so many processes."""
    return folder / f"worker-{row}-of-{rows}"


def kept_counts(folder: Path) -> list[int]:
    """Tell of how many processes the sequences are that a folder keeps; of several numbers, where that was changed."""
    kept = {1} if (folder / STORE_FILE).exists() else set()
    for file in folder.glob(f"worker-*/{STORE_FILE}"):
        if match := _PART.fullmatch(file.parent.name):
            kept.add(int(match[1]))
    return sorted(kept)


def check_store(folder: Path, rows: int) -> None:
    """See that sequences which are kept in a folder are found again by so many processes.

    Raises:
        ConfigError: they are another number's, and would be lost.
    """
    others = [count for count in kept_counts(folder) if count != rows]
    if others:
        counts = " and ".join(map(str, others))
        problem = Problem(
            f"{folder} has sequences of a server of {counts} workers",
            path="--sequence_store",
            expected=f"those of {rows}, or none",
            suggestion=f"start with --workers {others[0]}, give another folder, or remove {folder / STORE_FILE}"
            " and the folders worker-* beside it, if nobody goes on with them",
        )
        raise ConfigError([problem])
