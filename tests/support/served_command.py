"""The ``ovms`` command, imported once and run in processes forked from it."""

from __future__ import annotations

import os
import sys

import openvino  # noqa: F401 - imported for the forked processes
import trio  # noqa: F401

import ovmstrio.workers.serve  # noqa: F401
from ovmstrio.cli.main import main


def run_command(arguments: list[str], log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["ovms", *arguments]
    main()
