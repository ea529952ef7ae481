"""The first lines of a worker process, run by path under whichever interpreter: lets it find the server's packages.

The arguments are the descriptor of its end of the channel, that of a pipe that ends with the server, and the folders of
the packages by name, as JSON.  Older interpreters must be able to read this file far enough to be refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

__all__ = ["main"]


class _ServerPackages:
    """Finds the server's packages, and nothing else of what is installed beside them."""

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        """Find a package by its name."""
        folder = self._folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, Path(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def main() -> None:
    """Serve the server whose socket's descriptor is the first argument."""
    if not getattr(sys.flags, "safe_path", False):
        # The folder of this file is no place to import from.
        del sys.path[0]
    end, lifeline = int(sys.argv[1]), int(sys.argv[2])
    finder: Any = _ServerPackages(json.loads(sys.argv[3]) if sys.argv[3:] else {})
    sys.meta_path.insert(0, finder)
    sys.argv[1:] = []
    from ovmstrio.isolation.process_exit import NO_NUMPY, TOO_OLD  # noqa: PLC0415 - found only now

    if sys.version_info < (3, 10):  # noqa: UP036 - as said
        os._exit(TOO_OLD)
    if importlib.util.find_spec("numpy") is None:
        os._exit(NO_NUMPY)
    from ovmstrio.isolation.code_host import serve  # noqa: PLC0415 - as above

    serve(end, lifeline)


if __name__ == "__main__":
    main()
