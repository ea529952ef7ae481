"""The end of a process with that of whoever has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.waits import WAIT_SECONDS

_CODE = """
import sys
from ovmstrio.work.messages.lifeline import watch_lifeline
sys.stdin.readline()
watch_lifeline(int(sys.argv[1]))
print("watches", flush=True)
while True: pass
"""


def test_a_process_ends_when_its_lifeline_does() -> None:
    """Though it runs code that comes to no end."""
    process, kept_open = _started()
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "watches\n"
        assert process.poll() is None
        os.close(kept_open)
        assert process.wait(WAIT_SECONDS) == -signal.SIGIO


def test_a_process_ends_whose_lifeline_has_ended_while_it_started() -> None:
    """Before it could watch it."""
    process, kept_open = _started()
    os.close(kept_open)
    assert process.communicate("go\n", timeout=WAIT_SECONDS)[0] == ""
    assert process.returncode == -signal.SIGIO


def _started() -> tuple[subprocess.Popen[str], int]:
    """Give a process that watches its lifeline once it is told to, and what ends that."""
    lifeline, kept_open = os.pipe()
    command = [sys.executable, "-c", _CODE, str(lifeline)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lifeline,), text=True)
    os.close(lifeline)
    return process, kept_open
