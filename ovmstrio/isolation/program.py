"""Entry point of the server's worker programs: runs the module ``argv[1]`` as the program, without optional imports."""

from __future__ import annotations

import runpy
import sys

from ovmstrio.util.optional_imports import skip_optional_imports

if __name__ == "__main__":
    skip_optional_imports(["structlog"])
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
