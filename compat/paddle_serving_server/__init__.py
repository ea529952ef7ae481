"""Paddle Serving's server package as services import it, over ``ovmstrio.ops``.

``ovms run`` puts it on ``sys.path``.  Beside the original package it refuses to be imported, for one of the two would
stand in the other's place without anybody's knowing.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

__version__ = "0.9.0"
"""The release of Paddle Serving whose names are here."""


def _originals() -> list[str]:
    specs = [PathFinder.find_spec(__name__, [entry or str(Path.cwd())]) for entry in sys.path]
    origins = {Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin is not None}
    return sorted(str(origin.parent) for origin in origins if not _is_ours(origin))


def _is_ours(origin: Path) -> bool:
    """Tell by what it says of itself, for there may be several copies of ours."""
    return "ovmstrio" in origin.read_text(encoding="utf-8", errors="replace")


_found = _originals()
if _found:
    raise ImportError(
        f"the original paddle_serving_server is installed, too ({', '.join(_found)}), and only one can be imported: "
        "uninstall it (`pip uninstall paddle-serving-server`), or run the service without ovmstrio"
    )
