from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ovmstrio.extras import COMPAT_FOLDER
from tests.support.waits import WAIT_SECONDS

_SCRIPT = """
from paddle_serving_client.utils import MultiThreadRunner, benchmark_args, show_latency


def load(number, resource):
    return [[number, resource], [number * resource]] if number != resource else None


arguments = benchmark_args()
print(MultiThreadRunner().run(load, arguments.thread, arguments.batch_size))
show_latency([1, 2, 6])
"""


def test_load_scripts_call_in_processes_and_show_latencies(tmp_path: Path) -> None:
    script = tmp_path / "benchmark.py"
    script.write_text(_SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), "--thread", "3", "--batch_size", "2"],
        env={**os.environ, "PYTHONPATH": str(COMPAT_FOLDER)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=True,
    )
    assert done.stdout == "[[1, 2, 3, 2], [2, 6]]\n"
    assert done.stderr.startswith("latency:\nmean: 3.0ms\nmedian: 2.0ms\n80_percent: ")
