"""Command that measures this server and others in turn, with the same models, settings and load."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.matrix.cells import SIZES
from benchmarks.matrix.infer_requests import InferCall, MeasuredModel, failure_of, infer_call
from benchmarks.matrix.load import LoadFigures, load
from benchmarks.matrix.networks import input_of, network
from benchmarks.models import F32, write_repository
from benchmarks.peers.environments import version_of
from benchmarks.peers.servers import NAMES, OURS, peer
from benchmarks.processes import wait_idle
from benchmarks.report import machine, write_section

if TYPE_CHECKING:
    from benchmarks.matrix.cells import Interface
    from benchmarks.peers.servers import Peer

__all__ = ["measure_peers"]

_MODELS: Final = {"trivial": "10 us", "perceptron": "1 ms", "resnet": "75 ms"}
_INTERFACES: Final[tuple[Interface, ...]] = ("gRPC", "REST JSON", "REST binary")
_SETTINGS: Final = {**F32, "PERFORMANCE_HINT": "LATENCY"}
_CONCURRENCY: Final = 8
_ROUNDS: Final = 3
_SECONDS: Final = 2.0
_CYCLES: Final = 6.0
_HOW: Final = """Three models with dynamic batches in each server, compiled with {settings}; {concurrency} clients,
medians of {rounds} rounds in turn. Server and load generator share the cores. An empty cell: the server has no such
interface; LitServe and BentoML have their own JSON. ovmstrio knows the models from an earlier start.

Machine: {machine}.
"""


@dataclass(frozen=True, slots=True)
class _Question:
    """A model of a server, called over an interface."""

    model: str
    interface: Interface
    server: Peer
    call: InferCall

    @property
    def seconds(self) -> float:
        """Return the duration of a round."""
        return max(_SECONDS, _CYCLES * _CONCURRENCY * SIZES[_MODELS[self.model]])


def measure_peers(arguments: list[str]) -> None:
    """Measure this server and others, and print a table; ``--record`` writes it to RESULTS.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=measure_peers.__doc__)
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="how often each is measured")
    parser.add_argument("names", nargs="*", default=list(NAMES), help=f"which, of {', '.join(NAMES)}")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    table = _measure([name for name in NAMES if name in options.names], options.rounds)
    print(table)
    if options.record:
        how = _HOW.format(
            settings=json.dumps(_SETTINGS), concurrency=_CONCURRENCY, rounds=options.rounds, machine=machine()
        )
        write_section("peers", f"{how}\n{table}")


def _measure(names: list[str], rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        networks = {name: network(size, is_dynamic=True) for name, size in _MODELS.items()}
        config = write_repository(root / "models", networks, dict.fromkeys(networks, _SETTINGS))
        files = {name: root / "models" / name / "1" / "model.xml" for name in networks}
        targets = {
            name: MeasuredModel(name, *input_of(model), output=model.outputs[0].any_name)
            for name, model in networks.items()
        }
        # The first start of a model includes the crash probe, which later starts do not have.
        if OURS in names:
            with peer(OURS, config, files, _SETTINGS):
                pass
        servers = [stack.enter_context(peer(name, config, files, _SETTINGS)) for name in names]
        questions = [each for server in servers for each in _questions(server, targets, root)]
        taken: dict[_Question, list[LoadFigures]] = {each: [] for each in questions}
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for each in sorted(questions, key=lambda question: (question.model, question.interface)):
                taken[each].append(load(each.call, _CONCURRENCY, each.seconds, each.server.process))
                wait_idle(each.server.process)
        return f"{_starts(servers)}\n\n{_table(taken)}"


def _questions(server: Peer, targets: dict[str, MeasuredModel], root: Path) -> list[_Question]:
    found = []
    for target in targets.values():
        folder = root / server.name / target.model
        folder.mkdir(parents=True)
        interfaces = _INTERFACES if server.speaks_v2 else ("REST JSON",)
        for interface in interfaces:
            call = (
                infer_call(interface, target, server, folder) if server.speaks_v2 else _own_json(target, server, folder)
            )
            if failure := failure_of(call):
                print(f"{server.name} over {interface} left out: {failure.splitlines()[0][:200]}", file=sys.stderr)
            else:
                load(call, 1, 0.5, server.process)
                found.append(_Question(target.model, interface, server, call))
    return found


def _own_json(target: MeasuredModel, server: Peer, folder: Path) -> InferCall:
    body = folder / "own.json"
    body.write_text(json.dumps({"model": target.model, "input": target.array.tolist()}))
    return InferCall(
        f"http://127.0.0.1:{server.rest}/predict", body, ("content-type: application/json",), is_http1=True
    )


def _starts(servers: list[Peer]) -> str:
    lines = [
        f"| {server.name} {'' if server.name == OURS else version_of(server.name)} | {server.ready_seconds:.2f} "
        f"| {server.proportional_mb:.0f} |"
        for server in servers
    ]
    return "\n".join(["| server | seconds until ready | PSS after the load, MB |", "|---|---|---|", *lines])


def _table(taken: dict[_Question, list[LoadFigures]]) -> str:
    """Render a row per model and interface; a cell is calls per second, CPU per call and p99 of a server."""
    servers = sorted({each.server.name for each in taken}, key=NAMES.index)
    cells: dict[tuple[str, Interface], dict[str, str]] = {}
    for each, rounds in sorted(taken.items(), key=lambda item: (list(_MODELS).index(item[0].model), item[0].interface)):
        figures = LoadFigures(*(statistics.median(column) for column in zip(*rounds, strict=True)))
        cell = f"{figures.rate:.0f}, {figures.cpu_us:.0f}, {figures.p99_us / 1e3:.1f}"
        cells.setdefault((each.model, each.interface), {})[each.server.name] = cell
    head = f"| calls/s, CPU us, p99 ms | {' | '.join(servers)} |"
    lines = [
        f"| {model}, {_MODELS[model]}, {interface} | {' | '.join(of.get(name, '') for name in servers)} |"
        for (model, interface), of in cells.items()
    ]
    return "\n".join([head, "|---" * (len(servers) + 1) + "|", *lines])
