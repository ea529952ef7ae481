"""Entry point of a worker process, run by path under any interpreter; makes the server's package importable.

Arguments: descriptor of the channel, descriptor of the parent-watch pipe.
Interpreters older than 3.10 must be able to run this file far enough to be rejected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class _ServerPackage:
    """Finder of the server's package, but not of packages installed next to it."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name != "ovmstrio":
            return None
        folder = Path(__file__).resolve().parents[1]
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def main() -> None:
    """Run the worker program."""
    if not getattr(sys.flags, "safe_path", False):
        # Modules next to this file must not be importable as top-level modules.
        del sys.path[0]
    end, lifeline = int(sys.argv[1]), int(sys.argv[2])
    finder: Any = _ServerPackage
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
