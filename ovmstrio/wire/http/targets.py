"""The target of a request, which clients may write in several ways."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["origin_form"]

_AUTHORITY: Final = re.compile(r"https?://[^/]*", re.IGNORECASE)
"""What a target has before its path when it is written in full, as to a proxy."""


def origin_form(target: str) -> str:
    """Give a target's path, beginning with a slash."""
    path = _AUTHORITY.sub("", target, count=1)
    return path if path.startswith("/") else f"/{path}"
