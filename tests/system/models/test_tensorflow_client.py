from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ir
from tests.support.served_in_thread import serving_in_thread

TENSORFLOW_PYTHON = "OVMSTRIO_TENSORFLOW_PYTHON"
"""Names an interpreter that has tensorflow and tensorflow-serving-api, if this one has not."""


def _tensorflow_python() -> str:
    """Return an interpreter that can run TensorFlow's own client; without one the test is skipped."""
    named = os.environ.get(TENSORFLOW_PYTHON, "")
    if named:
        return named
    if not all(map(importlib.util.find_spec, ("tensorflow", "tensorflow_serving"))):
        pytest.skip(f"needs tensorflow and tensorflow-serving-api, here or in the interpreter of {TENSORFLOW_PYTHON}")
    return sys.executable


def test_client_of_tensorflow_runs_sequences(tmp_path: Path) -> None:
    script, python = Path(__file__).with_name("stateful_sample.py"), _tensorflow_python()
    base = ir.save(ir.accumulator(), tmp_path, "sums")
    with serving_in_thread(model_name="sums", model_path=base, stateful=True) as server:
        command = [python, str(script), server.grpc, "sums"]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    given = found["steps"][-1][1]
    assert found == {
        "steps": [[1, 10], [3, 10], [3, 10], [5, given], [5.5, given], [6.5, given]],
        "inputs": ["x"],
        "states": [[1, 30]],
    }
