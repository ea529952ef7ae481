"""Bytes of a tensor copied in a pipeline with one custom node; runs with ``counting.c`` preloaded.

python -m benchmarks.copies config.json library
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import trio

from benchmarks.requests import framed_infer_request
from ovmstrio.config.config_file import parse_config
from ovmstrio.config.specs import PipelineSpec
from ovmstrio.core.errors import NotFound
from ovmstrio.pipelines.loading import load_pipeline
from ovmstrio.pipelines.servable import PipelineServable
from ovmstrio.protocols.kserve.grpc_messages import decode_request, encode_response
from ovmstrio.server.kinds import KINDS

TENSOR_BYTES: Final = 1 << 20
_FRAME: Final = 5


def _counter(library: ctypes.CDLL, name: str) -> Callable[[], int]:
    function = library[name]
    function.restype = ctypes.c_uint64
    return function


def _check(copied: Callable[[], int]) -> None:
    """Verify that copies by Python and numpy are counted."""
    data, array = bytearray(TENSOR_BYTES), np.zeros(TENSOR_BYTES, np.uint8)
    for copy in (lambda: bytes(data), lambda: b"".join([data, b""]), array.copy, lambda: np.array(memoryview(data))):
        before = copied()
        copy()
        if copied() - before != TENSOR_BYTES:
            sys.exit(f"a copy of {TENSOR_BYTES} bytes was counted as {copied() - before}")


async def _nothing(name: str, version: str = "", /) -> NoReturn:
    raise NotFound(f"{name} {version}")


async def main(spec: PipelineSpec, library: Path) -> None:
    """Print the bytes copied before and after the node's call; the latter includes writing the message."""
    copied = _counter(ctypes.CDLL(None), "copied_bytes")
    before_node = _counter(ctypes.CDLL(str(library)), "copied_before_node")
    _check(copied)
    async with trio.open_nursery() as tasks:
        await _measure(spec, await load_pipeline(spec, lease=_nothing, tasks=tasks), copied, before_node)


async def _measure(
    spec: PipelineSpec, pipeline: PipelineServable, copied: Callable[[], int], before_node: Callable[[], int]
) -> None:
    message = framed_infer_request(spec.name, "x", np.zeros((1, TENSOR_BYTES // 4), np.float32))[_FRAME:]
    ways = []
    for _ in range(3):
        start = copied()
        body = encode_response(await pipeline.infer(decode_request(message)))
        ways.append((before_node() - start, copied() - before_node()))
        if len(body) < TENSOR_BYTES:
            sys.exit("the answer has no tensor")
    await pipeline.aclose()
    print(json.dumps(ways))


if __name__ == "__main__":
    config = Path(sys.argv[1])
    (only,) = parse_config(KINDS.values(), config.read_bytes(), config).of(PipelineSpec)
    trio.run(main, only, Path(sys.argv[2]))
