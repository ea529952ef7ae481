"""What can be seen of a shared library in its file, without opening it."""

from __future__ import annotations

import platform
from pathlib import Path
from struct import Struct
from typing import Final

from ovmstrio.util.regular_files import open_regular

__all__ = ["is_cut", "why_not_loadable"]

_HEADER: Final = Struct("<4sBB10xHH")
_CLASS_64: Final = 2
_LITTLE_ENDIAN: Final = 1
_SHARED_OBJECT: Final = 3
_MACHINES: Final = {
    3: "x86",
    8: "mips",
    21: "ppc64",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
}


def why_not_loadable(path: Path) -> str:
    """Look at a file and say what keeps it from being loaded, or nothing if that cannot be seen; blocking.

    The dynamic loader's own words mislead for a library of another machine.
    """
    try:
        with open_regular(path) as file:
            head = file.read(_HEADER.size)
    except OSError as error:
        return error.strerror or str(error)
    if len(head) < _HEADER.size or not head.startswith(b"\x7fELF"):
        return "it is no shared library (no ELF header)"
    _, word_size, order, kind, machine = _HEADER.unpack(head)
    if order != _LITTLE_ENDIAN or word_size != _CLASS_64:
        return "it is built for another kind of machine (not 64-bit little-endian)"
    built_for = _MACHINES.get(machine, f"machine {machine}")
    if built_for != platform.machine():
        return f"it is built for {built_for}, and this machine is {platform.machine()}"
    return "" if kind == _SHARED_OBJECT else "it is no shared library (link it with -shared)"


_SEGMENTS: Final = Struct("<32xQ14xHH")
_SEGMENT: Final = Struct("<I4xQ16xQ")
_LOADED: Final = 1


def is_cut(path: Path) -> bool:
    """Tell whether the end is missing of what is mapped into memory, so that opening it ends the process; blocking.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        head = file.read(_SEGMENTS.size)
        if len(head) < _SEGMENTS.size or head[:6] != b"\x7fELF" + bytes([_CLASS_64, _LITTLE_ENDIAN]):
            return False
        start, size, count = _SEGMENTS.unpack(head)
        file.seek(start)
        table = file.read(size * count)
        length = file.seek(0, 2)
    if size < _SEGMENT.size or len(table) < size * count:
        return True
    segments = (_SEGMENT.unpack_from(table, place) for place in range(0, size * count, size))
    return any(kind == _LOADED and begin + stored > length for kind, begin, stored in segments)
