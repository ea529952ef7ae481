"""Copies of versions on the local disk, complete from the moment that they can be found.

::

    <root>/<number>/<name>/<version>/<files>

Every copy has a folder of its own under a number of its own, so that one which is in use is never written to, and
the paths that ``load_model`` gets still end in the names of the model and the version.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ovmstrio.core.errors import StorageFailure
from ovmstrio.runtimes.handlers.models.sources import ModelSource
from ovmstrio.runtimes.handlers.models.tree import ModelKey, VersionFiles

__all__ = ["Copy", "CopyMaker"]


@dataclass(slots=True, eq=False)
class Copy:
    """A version's files on the local disk; equal to itself alone.

    Attributes:
        key: what it is a copy of.
        fingerprint: of the files when they were listed.
        folder: where the files are.
        uses: how many calls and loads need the files.
    """

    key: ModelKey
    fingerprint: str
    folder: Path
    uses: int = 0


class CopyMaker:
    """Makes copies; safe from any thread.  It blocks, and belongs in worker threads.

    Args:
        root: the folder where they are kept.
        sources: where versions are copied from.
    """

    def __init__(self, root: Path, sources: Sequence[ModelSource]) -> None:
        self._root = root
        self._sources = sources
        self._numbers = itertools.count(1)

    def make(self, key: ModelKey, version: VersionFiles) -> Copy:
        """Copy all files of a version out of its storage.

        Raises:
            StorageFailure: a file cannot be read from there, or not be written here; nothing is left of the copy.
        """
        storage = next(source.storage for source in self._sources if source.has(key))
        number = str(next(self._numbers))
        unfinished, place = self._root / f"{number}.part", self._root / number
        try:
            targets = {unfinished / key.name / key.version / file.path: file for file in version.files}
            for folder in {target.parent for target in targets}:
                folder.mkdir(parents=True, exist_ok=True)
            for target, file in targets.items():
                storage.fetch(file, target)
            unfinished.rename(place)
        except OSError as error:
            raise StorageFailure(f"{key} cannot be kept below {self._root}: {error}") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return Copy(key, version.fingerprint, place / key.name / key.version)

    def remove(self, copy: Copy) -> None:
        """Remove a copy's files."""
        shutil.rmtree(copy.folder.parent.parent, ignore_errors=True)
