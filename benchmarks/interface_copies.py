"""Number of copies of a large tensor between an interface and a model, and of the bytes of a message.

python -m benchmarks.interface_copies, which runs itself with ``counting.c`` preloaded
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino.opset13 as op
import trio

from benchmarks.pipeline_files import build
from benchmarks.report import Row
from ovmstrio.config.specs import ModelSpec
from tests.support import ir
from tests.support.api_clients import INTERFACES, serving_both

__all__ = ["run"]

COUNT: Final = 1 << 20
CALLS: Final = 5
_MOST: Final = {"grpc": 2, "http": 1}
_CLIENT: Final = """
import sys
import numpy as np
interface, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
module = __import__("tritonclient." + interface, fromlist=["x"])
tensor = module.InferInput("x", [1, count], "FP32")
tensor.set_data_from_numpy(np.ones((1, count), np.float32))
with module.InferenceServerClient(address) as client:
    for _ in range(int(sys.argv[4])):
        assert (client.infer("m", [tensor]).as_numpy("y") == 2).all()
"""


def _ask(interface: str, address: str, calls: int) -> None:
    """Call from a separate process, whose copies are not counted."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command = [sys.executable, "-c", _CLIENT, interface, address, str(COUNT), str(calls)]
    subprocess.run(command, env=environment, check=True)


async def _count() -> dict[str, float]:
    copied = ctypes.CDLL(None)["copied_bytes"]
    copied.restype = ctypes.c_uint64
    counts = {}
    given = ir.parameter("x", [-1, -1])
    model = ir.named_model({"y": op.add(given, op.constant(np.float32(1)))}, [given])
    with tempfile.TemporaryDirectory() as name:
        spec = ModelSpec(name="m", base_path=ir.save(model, Path(name), "m"))
        async with serving_both([spec]) as both:
            for interface in INTERFACES:
                ask = partial(_ask, interface, both.address(interface))
                await trio.to_thread.run_sync(ask, 1)
                before = copied()
                await trio.to_thread.run_sync(ask, CALLS)
                counts[interface] = (copied() - before) / (CALLS * COUNT * 4)
    return counts


def run() -> list[Row]:
    """Count the copies in this process."""
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "LD_PRELOAD": str(build("counting", Path(name)))}
        command = [sys.executable, "-m", "benchmarks.interface_copies"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    counts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    detail = f"{COUNT * 4} bytes each way, through a model; counted are large memcpy and memmove of the whole process"
    return [
        Row(
            f"copies of a tensor in and out, {interface}",
            counts[interface],
            f"<= {most}",
            counts[interface] <= most + 0.05,
            detail,
        )
        for interface, most in _MOST.items()
    ]


if __name__ == "__main__":
    print(json.dumps(trio.run(_count)))
