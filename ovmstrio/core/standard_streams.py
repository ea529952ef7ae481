"""Standard streams that a process can rely on: open from its first line on, and harmless where writes fail.

Needs nothing but the standard library, for it is imported before anything else.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Final, Literal

__all__ = ["ignore_failed_writes", "open_standard_streams"]

_STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


class _LossyStream(io.TextIOWrapper):
    """A stream that drops text that cannot be written: its reader has left, or its disk is full.

    The stream has no buffer: an interrupt may be raised behind any write, and a buffer would be written again then.
    """

    def write(self, text: str, /) -> int:
        """Write text, or drop it; returns its length."""
        try:
            return super().write(text)
        except OSError:
            return len(text)


def open_standard_streams() -> None:
    """Open /dev/null for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise the next socket or file gets that number, and what is printed goes there.
    """
    for descriptor, (name, mode) in enumerate(_STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - no path; kept open
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def ignore_failed_writes(*names: Literal["stdout", "stderr"]) -> None:
    """Drop what cannot be written to these streams, instead of raising; does nothing to a stream that was replaced."""
    for name in names:
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        raw: Any = io.FileIO(stream.fileno(), "w", closefd=False)
        lossy = _LossyStream(raw, stream.encoding, stream.errors, write_through=True)
        setattr(sys, name, lossy)
        setattr(sys, f"__{name}__", lossy)
