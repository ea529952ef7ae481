from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_a_process_left_running_fails_its_file(tmp_path: Path) -> None:
    leaving = tmp_path / "test_leaving.py"
    code = """
import subprocess, sys
left = [sys.executable, "-c", "import threading; threading.Event().wait()"]
subprocess.Popen(left, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""
    leaving.write_text(
        "import subprocess, sys\nfrom tests.support import isolation_checks\n"
        "isolation_checks.WAIT_SECONDS = 2\n\n"
        f"def test_leave():\n    subprocess.run([sys.executable, '-c', {code!r}])\n"
    )
    settings = ["-c", str(PROJECT / "pyproject.toml"), f"--rootdir={PROJECT}", "-p", "tests.system.conftest"]
    done = subprocess.run(
        [*PYTEST, *settings, "-p", "tests.conftest", str(leaving)],
        cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "still running after the last test of this file" in done.stdout
    assert "1 passed, 1 error" in done.stdout


@pytest.fixture(scope="module")
def changed() -> Iterator[logging.Logger]:
    logger = logging.getLogger("ovmstrio.of_a_test")
    mine = logging.NullHandler()
    logger.addHandler(mine)
    yield logger
    logger.removeHandler(mine)


@pytest.mark.parametrize("time", ["first", "second"])
def test_loggers_are_restored_after_each_test(changed: logging.Logger, time: str) -> None:
    assert [type(each) for each in changed.handlers] == [logging.NullHandler], time
    assert (changed.filters, changed.propagate, changed.disabled, changed.level) == ([], True, False, logging.NOTSET)
    changed.handlers[:] = [logging.StreamHandler()]
    changed.addFilter(lambda record: False)
    changed.propagate, changed.disabled = False, True
    changed.setLevel(logging.CRITICAL)
