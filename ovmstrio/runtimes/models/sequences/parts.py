"""Parts of a sequence store: the folder of each worker process."""

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
    """Return the folder of worker ``row`` of ``rows``."""
    return folder / f"worker-{row}-of-{rows}"


def kept_counts(folder: Path) -> list[int]:
    """Return the numbers of worker processes whose sequences a folder holds, sorted."""
    kept = {1} if (folder / STORE_FILE).exists() else set()
    for file in folder.glob(f"worker-*/{STORE_FILE}"):
        if match := _PART.fullmatch(file.parent.name):
            kept.add(int(match[1]))
    return sorted(kept)


def check_store(folder: Path, rows: int) -> None:
    """Check that the sequences in a folder belong to ``rows`` worker processes.

    Raises:
        ConfigError: they belong to another number of processes, and would be lost.
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
