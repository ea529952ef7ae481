"""Path entry of the packages that user code of other servers imports: ``pyovms``, ``cortex_internal`` and others.

Only processes that load user code have it on their path; the server itself imports nothing from it.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

__all__ = ["COMPAT_FOLDER", "add_compat_path"]

COMPAT_FOLDER: Final = Path(__file__).parents[1] / "compat"
"""Folder of the packages."""

_EXCHANGED: Final = ("pyovms", "cortex_internal")
"""Packages whose objects user code exchanges with the server, so that another package of the name cannot replace them.

The packages of Paddle Serving check for the originals themselves.
"""


def add_compat_path() -> None:
    """Put the folder first on ``sys.path`` once, and log installed packages of the same names, which are ignored."""
    folder = str(COMPAT_FOLDER)
    if folder in sys.path:
        return
    for name in _EXCHANGED:
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin is not None and not _is_ours(Path(spec.origin)):
            hint = f"user code gets the {name} of ovmstrio"
            logging.getLogger(__name__).warning("installed package ignored: %s in %s; %s", name, spec.origin, hint)
    sys.path.insert(0, folder)


def _is_ours(origin: Path) -> bool:
    """Return whether a file belongs to a copy of our package, of which there may be several."""
    return "ovmstrio" in origin.read_text(encoding="utf-8", errors="replace")
