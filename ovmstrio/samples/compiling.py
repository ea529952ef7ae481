"""Compilation of a sample's C nodes with ``ovms custom-node build``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["CompilationFailed", "compile_node"]


class CompilationFailed(OSError):
    """Failed compilation of a custom node; the message contains the compiler's output."""


def compile_node(source: Path) -> Path:
    """Run ``ovms custom-node build`` and return the path of the library, in the folder of the source.

    Raises:
        CompilationFailed: there is no compiler, or it failed.
    """
    command = [sys.executable, "-m", "ovmstrio.cli", "custom-node", "build", str(source)]
    done = subprocess.run(  # noqa: S603 - this package's own command
        command,
        check=False,
        capture_output=True,
        text=True,
        process_group=0,  # an interrupt is for the command
    )
    if done.returncode:
        raise CompilationFailed(f"{source.name} is a custom node in C that has to be compiled. {done.stderr.strip()}")
    return source.with_name(f"libcustom_node_{source.stem}.so")
