"""Pages of model files that are in memory for having been read while a model was compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ovmstrio.util.regular_files import open_regular

__all__ = ["let_file_pages_go"]

_MAPS: Final = Path("/proc/self/maps")
_MADV_DONTNEED: Final = 4
_FIELDS: Final = 6
_ELF: Final = b"\x7fELF"


def let_file_pages_go(folder: Path) -> int:
    """Let go of the pages of files below a folder that this process has mapped for reading; gives their bytes.

    OpenVINO maps the weights of a model for as long as it lives, and runs it on copies in an order of its own.  What is
    looked at once more comes back from the file, so that this is safe at any time, in any thread.

    Libraries stay: what the linker has written into them is not in their files, though nobody can write there any more.
    Gives 0 where the system does not tell what is mapped.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0
    return sum(
        size
        for begin, size in _mappings(f"{folder.resolve()}/")
        if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_DONTNEED) == 0
    )


def _mappings(prefix: str) -> Iterator[tuple[int, int]]:
    """Find where files of data are mapped that nobody can have changed in memory: the begins and the sizes."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(None, _FIELDS - 1)
        if len(fields) == _FIELDS and fields[-1].startswith(prefix) and "w" not in fields[1] and _is_data(fields[-1]):
            begin, end = (int(address, 16) for address in fields[0].split("-"))
            yield begin, end - begin


def _is_data(path: str) -> bool:
    """Tell whether a file is there and is no library."""
    try:
        with open_regular(path) as file:
            return file.read(len(_ELF)) != _ELF
    except OSError:
        return False
