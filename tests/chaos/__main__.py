"""Chaos test: servers are disturbed while clients call them, and every response is checked.

``python -m tests.chaos [--minutes N] [--seed N] [--only NAME ...]``

::

    chaos
    ├── proxies before both servers
    ├── callers: a task each, whose calls block in a thread
    ├── disturbances, one after the other
    └── hostile clients, concurrent with the disturbances
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import trio

from tests.chaos.callers import Caller, callers_of_everything, callers_of_project
from tests.chaos.disturbances import Disturbances, Parts
from tests.chaos.ledger import CallOutcome, Ledger
from tests.chaos.proxy import Proxy
from tests.chaos.world import FAKETIME, Resources, Server, everything, project, small_disk

WARM_SECONDS: Final = 5.0
SETTLE_SECONDS: Final = 5.0
THROUGH: Final = " through the proxy"
MORE_DESCRIPTORS: Final = 20
GROWTH: Final = 1.5
PAUSE_SECONDS: Final = 0.02
LONG_PAUSE_SECONDS: Final = 0.2
"""After anything but a right answer, as clients that are no attackers do."""


@dataclass(slots=True)
class Report:
    seed: int
    seconds: float
    ledger: Ledger = field(default_factory=Ledger)
    skipped: list[str] = field(default_factory=list)
    resources: dict[str, list[Resources]] = field(default_factory=dict)

    def __str__(self) -> str:
        held = [f"  {name}: {' -> '.join(map(str, each))}" for name, each in self.resources.items()]
        head = f"{self.seconds:.0f} s, again: just chaos --seed {self.seed}"
        return "\n".join([head, *(f"not done: {why}" for why in self.skipped), *held, str(self.ledger)])

    def note(self, servers: dict[str, Server]) -> None:
        for name, server in servers.items():
            self.resources.setdefault(name, []).append(server.resources())

    def judge(self) -> None:
        for name, (before, *_, after) in self.resources.items():
            if after.descriptors > before.descriptors + MORE_DESCRIPTORS or after.processes > before.processes:
                self.ledger.find(f"{name} keeps something: {before} before, {after} after")
            if after.resident_mb > before.resident_mb * GROWTH:
                self.ledger.find(f"{name} has grown: {before} before, {after} after")


class _Choice(NamedTuple):
    only: tuple[str, ...]
    disk: Path | None
    clock: Path | None


async def chaos(folder: Path, seconds: float, seed: int, only: Sequence[str] = ()) -> Report:
    report = Report(seed, seconds)
    with ExitStack() as stack:
        why_not = stack.enter_context(small_disk(folder / "disk"))
        if why_not:
            report.skipped.append(f"full disks: {why_not}")
        clock = folder / "clock" if FAKETIME.exists() else None
        if clock is None:
            report.skipped.append(f"clock jumps: there is no {FAKETIME} (libfaketime)")
        else:
            clock.write_text("+0")
        (folder / "served").mkdir()
        servers = {"all kinds": everything(folder / "served", folder / "disk", clock), "project": project(folder)}
        for server in servers.values():
            stack.callback(server.close)
            await trio.to_thread.run_sync(server.start)
        disk = None if why_not else folder / "disk"
        await _disturbed(folder, servers, report, _Choice(tuple(only), disk, clock))
        for name, server in servers.items():
            code = await trio.to_thread.run_sync(server.stop)
            if code:
                report.ledger.find(f"{name} ended with {code}")
            _look_into_log(name, server, report)
    report.judge()
    return report


async def _disturbed(folder: Path, servers: dict[str, Server], report: Report, choice: _Choice) -> None:
    every, project_server = servers.values()
    random, over = Random(report.seed), trio.Event()
    async with trio.open_nursery() as proxying:
        proxies = [Proxy(port) for port in (every.grpc, every.rest, project_server.rest)]
        ports = [await proxying.start(proxy.run) for proxy in proxies]
        direct = [*callers_of_everything(every.grpc, every.rest), *callers_of_project(project_server.rest)]
        through = callers_of_everything(ports[0], ports[1], THROUGH) + callers_of_project(ports[2], THROUGH)
        callers = direct + through
        parts = Parts(
            every, project_server, folder / "served", tuple(proxies), _names(through),
            frozenset(name for name in _names(callers) if "project" in name),
            choice.disk, choice.clock,
        )  # fmt: skip
        disturbances = Disturbances(parts, report.ledger, random)
        async with trio.open_nursery() as calling:
            for caller in callers:
                calling.start_soon(_call, caller, report.ledger, over)
            await trio.sleep(WARM_SECONDS)
            report.note(servers)
            await _disturb(disturbances, random, servers, report, choice.only)
            over.set()
        await trio.sleep(SETTLE_SECONDS)
        report.note(servers)
        proxying.cancel_scope.cancel()


def _names(callers: Sequence[Caller]) -> frozenset[str]:
    return frozenset(caller.name for caller in callers)


async def _call(caller: Caller, ledger: Ledger, over: trio.Event) -> None:
    number = 0
    try:
        while not over.is_set():
            number += 1
            begun = time.monotonic()
            outcome, context = await trio.to_thread.run_sync(caller.ask, number)
            ledger.note(caller.name, outcome, begun, context)
            await trio.sleep(PAUSE_SECONDS if outcome is CallOutcome.RIGHT else LONG_PAUSE_SECONDS)
    finally:
        caller.close()


async def _disturb(
    disturbances: Disturbances, random: Random, servers: dict[str, Server], report: Report, only: Sequence[str]
) -> None:
    async with trio.open_nursery() as nursery:
        chosen = [each for each in disturbances.all() if not only or each.__name__ in only]
        if not only or disturbances.attack.__name__ in only:
            nursery.start_soon(_attack, disturbances.attack, random)
        ends = trio.current_time() + report.seconds
        while trio.current_time() < ends:
            await random.choice(chosen or [disturbances.wait])()
            for name, server in servers.items():
                _look_into_log(name, server, report)
                if not server.is_running:
                    report.ledger.find(f"{name} has ended")
                    await trio.to_thread.run_sync(server.start)
            await trio.sleep(random.uniform(0, 1))
        nursery.cancel_scope.cancel()


async def _attack(attack: Callable[[], Awaitable[None]], random: Random) -> None:
    while True:
        await trio.sleep(random.uniform(2, 10))
        await attack()


def _look_into_log(name: str, server: Server, report: Report) -> None:
    for fault in server.faults_in_log():
        report.ledger.find(f"a traceback of {name}: {fault}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb servers in every way while clients call them.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**32)
    parser.add_argument("--only", nargs="*", default=[], help="methods of Disturbances; all of them otherwise")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = trio.run(partial(chaos, Path(folder), given.minutes * 60, given.seed, given.only))
    print(report)  # noqa: T201 - the output of the program
    sys.exit(bool(report.ledger.violations()))


if __name__ == "__main__":
    main()
