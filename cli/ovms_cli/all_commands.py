"""The command line with all of its commands, for whoever looks at it as a whole."""

from __future__ import annotations

from typing import Final

from ovms_cli.main import command_line

app: Final = command_line()
