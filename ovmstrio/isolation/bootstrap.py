"""Entry point of a worker process, run by path under any interpreter; makes the server's packages importable.

Arguments: descriptor of the channel, descriptor of the parent-watch pipe, JSON object of package names and folders.
Interpreters older than 3.10 must be able to run this file far enough to be rejected.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class _ServerPackages:
    """Finder of the server's packages, but not of other packages installed next to them."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        folder = self._folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, Path(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def main() -> None:
    """Run the worker program."""
    if not getattr(sys.flags, "safe_path", False):
        # Modules next to this file must not be importable as top-level modules.
        del sys.path[0]
    end, lifeline = int(sys.argv[1]), int(sys.argv[2])
    finder: Any = _ServerPackages(json.loads(sys.argv[3]) if sys.argv[3:] else {})
    sys.meta_path.insert(0, finder)
    sys.argv[1:] = []
    from ovmstrio.isolation.exit_status import NUMPY_MISSING, PYTHON_TOO_OLD  # noqa: PLC0415 - needs the finder

    if sys.version_info < (3, 10):  # noqa: UP036 - the interpreter is the user's
        os._exit(PYTHON_TOO_OLD)
    if importlib.util.find_spec("numpy") is None:
        os._exit(NUMPY_MISSING)
    from ovmstrio.isolation.code_host import serve  # noqa: PLC0415 - needs the finder

    serve(end, lifeline)


if __name__ == "__main__":
    main()
