"""What a command line imports: the command that it names, and nothing that only others need."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SHOW = """
import atexit, sys

@atexit.register
def show():
    sys.stderr.write("imported: " + " ".join(sys.modules))

from ovms_cli.entry import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        (("--help",), ("pydantic", "numpy", "trio", "openvino")),
        (("--version",), ("pydantic", "numpy", "trio", "openvino", "rich")),
        (("keys", "list"), ("ovms_cli.serve", "ovms_cli.chat", "ovmstrio.server.settings", "numpy", "trio")),
        (("health", "--help"), ("ovms_cli.serve", "ovms_cli.chat", "ovmstrio.server.settings", "numpy")),
    ],
)
def test_a_command_imports_nothing_that_others_need(arguments: tuple[str, ...], without: tuple[str, ...]) -> None:
    """Neither help nor the version needs what describes a server's settings."""
    command = [sys.executable, "-c", _SHOW, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    imported = done.stderr.partition("imported: ")[2].split()
    assert "ovms_cli.main" in imported, done.stderr
    assert [name for name in without if name in imported] == []


def test_a_command_that_serves_nothing_has_the_collector_look_again() -> None:
    """What imports are spared is over when a command is to run that may go on for hours."""
    code = _SHOW.replace('" ".join(sys.modules)', 'str(__import__("gc").get_threshold()[0])')
    command = [sys.executable, "-c", code, "health", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert int(done.stderr.partition("imported: ")[2]) <= 20_000
