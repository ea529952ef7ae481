"""What the library raises, in words for callers: without the places in its sources, and without its makers' folders."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["reason_of"]

_CHECK: Final = re.compile(r"(?s)^Check '(?P<check>.*?)' failed at \S+:\d+:\s*(?P<why>.*)$")
_LOGGED: Final = re.compile(r"(?s)^\[[0-9:]+\] \S+:\d+: (?P<why>.*)$")
_RAISED: Final = re.compile(r"(?s)^Exception from \S+:\d+:\s*(?P<why>.*)$")


def reason_of(error: BaseException) -> str:
    """Give the reason in an error of the library's."""
    text = str(error).strip()
    for _ in range(3):
        found = _CHECK.match(text) or _LOGGED.match(text) or _RAISED.match(text)
        if found is None:
            break
        text = found["why"].strip() or found.groupdict().get("check") or text
    return text or type(error).__name__
