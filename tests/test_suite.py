"""What the suite promises of itself."""

from __future__ import annotations

import ast
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.examples import examples
from tests.support.whole_ends import end_of_output

PROJECT = Path(__file__).parents[1]
_OWN = {"self", "cls", "mcs"}
_MAY_BE_PRIVATE = re.compile(r"(?<!self)(?<!cls)\._[a-zA-Z]|[\"']_[a-zA-Z]|\bimport\b[^.]*?\b_[a-zA-Z]\w*\s*[,)\n]")
"""Saves parsing most files."""
_BY_NAME = {"setattr", "delattr", "getattr", "hasattr"}
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


def _uses_private_names(tree: ast.Module) -> bool:
    """Return whether a file imports private names, accesses those of other objects, or patches them by name."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in _OWN):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if called in _BY_NAME:
                texts = (each.value for each in node.args[:2] if isinstance(each, ast.Constant))
                names = [each.rpartition(".")[2] for each in texts if isinstance(each, str)]
        if any(name.startswith("_") and not name.startswith("__") for name in names):
            return True
    return False


def test_few_test_files_use_private_names() -> None:
    """Ruff reports accesses file by file; this bound also covers imports and patches, which Ruff does not report."""
    files = sorted((PROJECT / "tests").rglob("*.py"))
    suspected = [file for file in files if _MAY_BE_PRIVATE.search(file.read_text())]
    private = [str(file) for file in suspected if _uses_private_names(ast.parse(file.read_text()))]
    assert 0 < len(private) <= len(files) * 0.05, private


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


def test_a_process_that_outlives_who_started_it_fails_its_file(tmp_path: Path) -> None:
    """Though it is nobody's child any more, and none of the output of the tests."""
    leaving = tmp_path / "test_leaving.py"
    quiet = "subprocess.Popen(left, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    code = f"{_LEAVING}\n{quiet}"
    leaving.write_text(
        f"import subprocess, sys\n\ndef test_leave():\n    subprocess.run([sys.executable, '-c', {code!r}])\n"
    )
    settings = ["-c", str(PROJECT / "pyproject.toml"), f"--rootdir={PROJECT}", "-p", "tests.conftest"]
    done = subprocess.run(
        [*PYTEST, *settings, str(leaving)], cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False
    )
    assert "still running after the last test of this file" in done.stdout
    assert "1 passed, 1 error" in done.stdout


def test_processes_that_tests_start_keep_nothing_in_the_users_own_folder() -> None:
    """Neither trials nor compiled models, which are left there for every server of the user."""
    code = "from platformdirs import user_cache_path; print(user_cache_path('ovmstrio'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not Path(told.stdout.strip()).is_relative_to(Path.home() / ".cache")


@pytest.fixture(scope="module")
def spoilt() -> Iterator[logging.Logger]:
    """A logger with a handler, of which a test of this module makes something else."""
    logger = logging.getLogger("ovmstrio.of_a_test")
    mine = logging.NullHandler()
    logger.addHandler(mine)
    yield logger
    logger.removeHandler(mine)


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_logger_is_what_it_was_before_the_last_test(spoilt: logging.Logger, time: str) -> None:
    """Whatever a test sets of it; handlers that were there stay, those of the test are closed."""
    assert [type(each) for each in spoilt.handlers] == [logging.NullHandler], time
    assert (spoilt.filters, spoilt.propagate, spoilt.disabled, spoilt.level) == ([], True, False, logging.NOTSET)
    spoilt.handlers[:] = [logging.StreamHandler()]
    spoilt.addFilter(lambda record: False)
    spoilt.propagate, spoilt.disabled = False, True
    spoilt.setLevel(logging.CRITICAL)


def test_properties_have_all_their_examples_in_slow_runs(pytestconfig: pytest.Config) -> None:
    """And fewer elsewhere, in one measure."""
    usual = 100 if pytestconfig.getoption("--run-slow") else 30
    assert (settings().max_examples, examples(300), examples(1)) == (usual, 3 * usual, 1)
