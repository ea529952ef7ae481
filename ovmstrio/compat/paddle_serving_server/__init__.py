"""Paddle Serving's server package over ``ovmstrio.ops``.

``ovms paddle run`` puts it on ``sys.path``.  It refuses to be imported if the original package is installed too,
because one would silently replace the other.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

__version__ = "0.9.0"
"""Supported release of Paddle Serving."""


def refuse_original(package: str) -> None:
    """Raise ImportError if the original package of that name is installed too."""
    found = _originals(package)
    if found:
        raise ImportError(
            f"the original {package} is also installed ({', '.join(found)}), and only one can be imported: "
            f"uninstall it (`pip uninstall {package.replace('_', '-')}`), or run the service without ovmstrio"
        )


def _originals(package: str) -> list[str]:
    specs = [PathFinder.find_spec(package, [entry or str(Path.cwd())]) for entry in sys.path]
    origins = {Path(spec.origin).resolve() for spec in specs if spec is not None and spec.origin is not None}
    return sorted(str(origin.parent) for origin in origins if not _is_ours(origin))


def _is_ours(origin: Path) -> bool:
    """Return whether a file is a copy of this module or of its alias, of which there may be several."""
    text = origin.read_text(encoding="utf-8", errors="replace")
    return "ovmstrio" in text or "refuse_original" in text


refuse_original(__name__)
