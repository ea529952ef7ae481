"""Rate of a model in OpenVINO alone: the better one of an asynchronous queue and a synchronous loop.

The measurement runs in a separate process, which idles between its turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["OpenVinoAlone", "openvino_alone"]


class OpenVinoAlone:
    """Process that runs one model."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rate(self, seconds: float) -> float:
        """Run both ways for the given time; return inferences per second of the better one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("OpenVINO alone has ended")
        return float(line)


@contextmanager
def openvino_alone(model: Path, settings: dict[str, str]) -> Iterator[OpenVinoAlone]:
    """Start a process that compiles a model and runs it on request, until the block ends."""
    command = [sys.executable, "-m", __name__, str(model), json.dumps(settings)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield OpenVinoAlone(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)


def _rate(run: Callable[[], object], finish: Callable[[], object], seconds: float) -> float:
    count, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        run()
        count += 1
    finish()
    return count / (time.perf_counter() - begin)


def _main(path: str, settings: dict[str, str]) -> None:
    import openvino as ov  # noqa: PLC0415 - only the child process needs it

    from benchmarks.matrix.networks import input_of  # noqa: PLC0415 - as above

    core = ov.Core()
    model = core.read_model(path)
    _, array = input_of(model)
    compiled = core.compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    options: dict[str, Any] = {"share_inputs": True}
    queue = ov.AsyncInferQueue(compiled)

    def synchronous() -> None:
        request.infer([array], share_outputs=True, **options)

    def queued() -> None:
        queue.start_async([array], **options)

    for run in (synchronous, queued):
        _rate(run, queue.wait_all, 0.2)
    for line in sys.stdin:
        seconds = float(line)
        print(max(_rate(synchronous, queue.wait_all, seconds), _rate(queued, queue.wait_all, seconds)), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]))
