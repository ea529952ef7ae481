"""What the suite promises of itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.examples import examples
from tests.support.whole_ends import end_of_output

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


_LEAVING = """
import subprocess, sys
left = [sys.executable, "-c", "import threading; threading.Event().wait()"]
"""


def test_what_a_process_leaves_behind_is_told_and_ended() -> None:
    """Whoever wants the rest of its output waits no longer than it says, though something else can still write."""
    code = f"{_LEAVING}\nprint(subprocess.Popen(left).pid)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match=r"still running 2 s .*threading\.Event") as told:
        end_of_output(process, 2)
    # What was printed before is told, too; and since it is whole, nothing can write any more.
    number = str(told.value).split()[-1]
    assert f"{number} {sys.executable}" in str(told.value)


def test_processes_that_tests_start_keep_nothing_in_the_users_own_folder() -> None:
    """Neither trials nor compiled models, which are left there for every server of the user."""
    code = "from platformdirs import user_cache_path; print(user_cache_path('ovmstrio'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not Path(told.stdout.strip()).is_relative_to(Path.home() / ".cache")


def test_properties_have_all_their_examples_in_slow_runs(pytestconfig: pytest.Config) -> None:
    """And fewer elsewhere, in one measure."""
    usual = 100 if pytestconfig.getoption("--run-slow") else 30
    assert (settings().max_examples, examples(300), examples(1)) == (usual, 3 * usual, 1)
