"""Text generation through the server, against the same generator in a bare process."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.processes import ovms
from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["run"]

PROMPT = "Tell a long story about a lighthouse keeper."
TOKENS = 192
ROUNDS = 4
GOAL = 0.97


def _rate(pieces: Iterator[object]) -> float:
    """Return pieces per second from the first to the last one, without the time of the prompt."""
    next(pieces)
    started = time.perf_counter()
    count = sum(1 for _ in pieces)
    return count / (time.perf_counter() - started)


def _bare(folder: Path) -> None:
    """Print the rate of the handler's generator for each line of the input, after a warm-up run."""
    import pyovms  # noqa: PLC0415 - only this part of the benchmark needs it

    class Context:
        parameters = {"max_new_tokens": TOKENS}  # noqa: RUF012 - never changed

    spec = importlib.util.spec_from_file_location("generator", folder / "generator.py")
    assert spec is not None
    assert spec.loader is not None
    pyovms.current_context = Context  # type: ignore[assignment]
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.OvmsPythonModel()
    model.initialize({"base_path": str(folder)})
    for _ in sys.stdin:
        print(_rate(iter(model.execute([pyovms.Tensor("prompt", PROMPT.encode())]))), flush=True)


@contextmanager
def _bare_runs(folder: Path) -> Iterator[Callable[[], float]]:
    """Start a process that runs the bare generator on request."""
    command = [sys.executable, "-m", "benchmarks.text_generation", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        to, out = process.stdin, process.stdout
        assert to is not None
        assert out is not None

        def rate() -> float:
            to.write("again\n")
            to.flush()
            return float(out.readline())

        yield rate
        to.close()


def _in_turn(config: Path, folder: Path) -> list[tuple[float, float]]:
    """Measure the server and the bare process alternately, while both processes exist."""
    from ovmstrio.samples.text_generation.client import completions  # noqa: PLC0415 - only this part of the benchmark needs it

    with ovms(config) as server, _bare_runs(folder) as bare:
        url = f"127.0.0.1:{server.grpc}"
        return [(_rate(completions(url, PROMPT, TOKENS)), bare()) for _ in range(ROUNDS + 1)][1:]


def run() -> list[Row]:
    """Measure both in turn, with three pairs of processes."""
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name)
        prepare = [sys.executable, "-m", "ovmstrio.cli", "prepare", "--sample", "text_generation"]
        subprocess.run([*prepare, "--repository", name], check=True, capture_output=True)
        folder = repository / "text_generation"
        config = repository / "config.json"
        entry = {"name": "text_generation", "base_path": str(folder)}
        config.write_text(json.dumps({"model_config_list": [], "mediapipe_config_list": [entry]}))
        pairs = [pair for _ in range(3) for pair in _in_turn(config, folder)]
    served, bare = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    detail = f"SmolLM2-135M, {served:.1f} pieces/s served, {bare:.1f} bare, {TOKENS} tokens"
    return [Row("text generation, against the same generator run bare", ratio, f">= {GOAL}", ratio >= GOAL, detail)]


if __name__ == "__main__":
    _bare(Path(sys.argv[1]))
