"""The reference of the command line, as the documentation has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REFERENCE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_reference_is_what_the_commands_say(tmp_path: Path) -> None:
    """A changed option is a changed page; ``just docs`` writes it again."""
    made = tmp_path / "cli.md"
    command = [sys.executable, "-m", "typer", "ovms_cli.main", "utils", "docs", "--name", "ovms", "--output", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    assert made.read_text() == REFERENCE.read_text()
