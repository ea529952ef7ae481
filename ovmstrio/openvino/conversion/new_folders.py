"""Folders that appear when they are whole: versions of a repository, and what else a server may be watching."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ovmstrio.core.errors import AlreadyExists

__all__ = ["new_folder", "new_version", "refuse_existing"]


def refuse_existing(target: Path, another: str, *, force: bool) -> None:
    """Refuse to write what exists; ``another`` is the option that leads elsewhere.

    Raises:
        AlreadyExists: it exists and ``force`` is not set.
    """
    if target.exists() and not force:
        raise AlreadyExists(f"{target} exists; choose another {another}, or replace it with --force")


@contextmanager
def new_folder(target: Path, *, force: bool = False, another: str = "--repository") -> Iterator[Path]:
    """Give a folder to fill, which becomes ``target`` when the block ends without error.

    A server that watches the repository never sees it half-written.  After an error nothing is left of it, nor of the
    folders above it that were not there.

    Raises:
        AlreadyExists: it exists and ``force`` is not set; ``another`` is the option that leads elsewhere.
    """
    refuse_existing(target, another, force=force)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        yield made
        if target.exists():
            target.rename(scratch / "replaced")
        made.rename(target)
    finally:
        shutil.rmtree(scratch)
        for parent in new_parents:
            with suppress(OSError):  # what is not empty stays
                parent.rmdir()


@contextmanager
def new_version(repository: Path, name: str, version: int = 1, *, force: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which becomes ``<repository>/<name>/<version>``; as :func:`new_folder` otherwise."""
    with new_folder(repository / name / str(version), force=force, another="--version") as made:
        yield made
