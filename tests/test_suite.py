"""What the suite promises of itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_interrupts_arrive() -> None:
    """A test that sends SIGINT to itself, or to what it has started, is heard."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


def test_interrupts_arrive_where_a_shell_has_them_ignored() -> None:
    """The jobs that a script starts behind ``&`` are such."""
    command = [*PYTEST, f"{__file__}::{test_interrupts_arrive.__name__}"]
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]
    done = subprocess.run(ignoring, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_a_test_that_waits_for_ever_ends_the_run_and_shows_where(tmp_path: Path) -> None:
    """The bound holds whatever the test waits for, and for tests that set none themselves."""
    hanging = tmp_path / "test_hanging.py"
    hanging.write_text("import threading\n\ndef test_wait():\n    threading.Event().wait()\n")
    settings = ["-c", str(PROJECT / "pyproject.toml"), "-o", "faulthandler_timeout=0.5"]
    done = subprocess.run(
        [*PYTEST, *settings, str(hanging)], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "test_hanging.py" in done.stderr
