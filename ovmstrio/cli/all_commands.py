"""The command line with all commands, for the reference and for tests."""

from __future__ import annotations

from typing import Final

from ovmstrio.cli.main import command_line

app: Final = command_line()
