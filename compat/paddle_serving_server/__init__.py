"""Paddle Serving's server package over ``ovmstrio.ops``.

``ovms run`` puts it on ``sys.path``.  It refuses to be imported if the original package is installed too, because one
would silently replace the other.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

__version__ = "0.9.0"
"""Supported release of Paddle Serving."""


def _originals() -> list[str]:
    specs = [PathFinder.find_spec(__name__, [entry or str(Path.cwd())]) for entry in sys.path]
    origins = {Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin is not None}
    return sorted(str(origin.parent) for origin in origins if not _is_ours(origin))


def _is_ours(origin: Path) -> bool:
    """Return whether a file is a copy of this module, of which there may be several."""
    return "ovmstrio" in origin.read_text(encoding="utf-8", errors="replace")


_found = _originals()
if _found:
    raise ImportError(
        f"the original paddle_serving_server is also installed ({', '.join(_found)}), and only one can be imported: "
        "uninstall it (`pip uninstall paddle-serving-server`), or run the service without ovmstrio"
    )
