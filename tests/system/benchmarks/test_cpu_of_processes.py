"""What processes have used of the processors, as benchmarks count it."""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmarks.processes import cpu_of_tree

_BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
_PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_BURN!r}], check=True)
print("over", flush=True)
sys.stdin.read()
"""


def test_cpu_of_ended_children_is_counted() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == b"over\n"
        used = cpu_of_tree(psutil.Process(parent.pid))
        parent.stdin.close()
        assert parent.wait(20) == 0
    assert used >= 0.3
