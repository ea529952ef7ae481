"""CPU of a call in the client's process: ``ovmstrio.client`` against tritonclient, over gRPC and REST.

Every measurement is a separate process, which makes its inputs, calls in a loop and reads the output as an array.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import openvino as ov
import openvino.opset13 as op

from benchmarks.models import write_repository
from benchmarks.processes import ovms
from benchmarks.report import Row
from tests.support import ir

if TYPE_CHECKING:
    from benchmarks.processes import Server

__all__ = ["run"]

ROUNDS: Final = 5
SIZES: Final = {"10 floats": ("1,10", 2_000), "1x3x224x224": ("1,3,224,224", 300), "8x3x224x224": ("8,3,224,224", 60)}
"""Shape of the FP32 input and number of calls."""
GOAL: Final = 0.9

_HEAD: Final = """
import asyncio, sys, time
import numpy as np
protocol, backend, address, shape, calls = sys.argv[1:]
data = np.ones(tuple(map(int, shape.split(","))), np.float32)

def report(began):
    print((time.process_time() - began) / int(calls) * 1e6)
"""
_TRITON: Final = (
    _HEAD
    + """
name = "tritonclient." + protocol + ("" if backend == "sync" else ".aio")
module = __import__(name, fromlist=["x"])

def inputs():
    tensor = module.InferInput("x", data.shape, "FP32")
    tensor.set_data_from_numpy(data)
    return [tensor]

def loop():
    with module.InferenceServerClient(address) as client:
        for number in range(int(calls) + 20):
            if number == 20:
                began = time.process_time()
            assert client.infer(f"m{data.ndim}", inputs()).as_numpy("y")[0] == 1
        report(began)

async def aio_loop():
    async with module.InferenceServerClient(address) as client:
        for number in range(int(calls) + 20):
            if number == 20:
                began = time.process_time()
            assert (await client.infer(f"m{data.ndim}", inputs())).as_numpy("y")[0] == 1
        report(began)

loop() if backend == "sync" else asyncio.run(aio_loop())
"""
)
_OURS: Final = (
    _HEAD
    + """
from ovmstrio.client import AsyncClient, Client
url = ("grpc://" if protocol == "grpc" else "http://") + address

def loop():
    with Client(url) as client:
        for number in range(int(calls) + 20):
            if number == 20:
                began = time.process_time()
            assert client.infer(f"m{data.ndim}", {"x": data})["y"][0] == 1
        report(began)

async def async_loop():
    async with AsyncClient(url) as client:
        for number in range(int(calls) + 20):
            if number == 20:
                began = time.process_time()
            assert (await client.infer(f"m{data.ndim}", {"x": data}))["y"][0] == 1
        report(began)

if backend == "sync":
    loop()
else:
    import anyio
    anyio.run(async_loop, backend=backend)
"""
)


def _cpu_us(program: str, protocol: str, backend: str, server: Server, size: str) -> float:
    shape, calls = SIZES[size]
    address = f"127.0.0.1:{server.grpc if protocol == 'grpc' else server.rest}"
    command = [sys.executable, "-c", program, protocol, backend, address, shape, str(calls)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _compare(server: Server, protocol: str, backend: str, size: str) -> Row:
    """Measure both in turn, in alternating order; return the ratio of the medians."""
    ours, theirs = list[float](), list[float]()
    peer = "sync" if backend == "sync" else "aio"
    sides = ((_OURS, backend, ours), (_TRITON, peer, theirs))
    for number in range(ROUNDS):
        for program, name, taken in sides if number % 2 else sides[::-1]:
            taken.append(_cpu_us(program, protocol, name, server, size))
    mine, others = statistics.median(ours), statistics.median(theirs)
    return Row(
        f"CPU of a call, {protocol}, {backend}, {size}",
        mine / others,
        f"<= {GOAL}",
        mine / others <= GOAL,
        f"{mine:.0f} us, tritonclient {others:.0f} us",
    )


def _maximum(rank: int) -> ov.Model:
    """FP32 ``x`` of any size to its largest value ``y`` [1]: little work for the server, and a small response."""
    x = ir.parameter("x", [-1] * rank)
    values = op.reshape(x, np.array([-1]), special_zero=False)
    return ir.named_model({"y": op.reduce_max(values, np.array([0]), keep_dims=True)}, [x])


def run() -> list[Row]:
    """Measure with one server in a separate process."""
    models = {f"m{rank}": _maximum(rank) for rank in (2, 4)}
    with tempfile.TemporaryDirectory() as folder, ovms(write_repository(Path(folder), models, {})) as server:
        return [
            _compare(server, protocol, backend, size)
            for protocol in ("grpc", "http")
            for backend in ("sync", "asyncio", "trio")
            for size in SIZES
        ]
