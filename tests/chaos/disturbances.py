"""Disturbances of servers under load, each with the errors that clients may get meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import trio

from tests.attacks.attacks import ATTACKS
from tests.chaos.ledger import CallOutcome, Ledger
from tests.chaos.proxy import Proxy
from tests.chaos.world import Server

HOSTILE_SECONDS: Final = 60.0
RECOVERY_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Parts:
    """Servers and files that disturbances act on.

    Attributes:
        through: the names of the clients that go through the proxies.
        of_project: the names of the project's clients.
        disk: the small disk, None where there is none.
        clock: the file that sets the clock, None where it cannot be set.
    """

    everything: Server
    project: Server
    folder: Path
    proxies: tuple[Proxy, ...]
    through: frozenset[str]
    of_project: frozenset[str]
    disk: Path | None
    clock: Path | None


class Disturbances:
    def __init__(self, parts: Parts, ledger: Ledger, random: Random) -> None:
        self._parts, self._ledger, self._random = parts, ledger, random
        self._changes = 0
        self._attacked = False

    def all(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        parts = self._parts
        found: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self.reload, self.reload, self.break_config, self.kill_worker, self.restart, self.restart_project,
            self.pause, self.cut, self.delay, self.half_close,
        ]  # fmt: skip
        found += [self.fill_disk] if parts.disk else []
        return found + ([self.jump] if parts.clock else [])

    async def wait(self) -> None:
        await trio.sleep(1)

    async def reload(self) -> None:
        self._changes += 1
        folder = self._parts.folder
        with self._ledger.window("reload"):
            config = folder / "config.json"
            document = json.loads(config.read_text())
            document["model_config_list"][0]["config"]["nireq"] = 1 + self._changes % 3
            _replace(config, json.dumps(document, indent=1))
            for name in ("graph/node.py", "ops/web_service.py", "handler/handler.py"):
                path = folder / name
                _replace(path, path.read_text().split("# change ")[0] + f"# change {self._changes}\n")
            await trio.sleep(2)

    async def break_config(self) -> None:
        config = self._parts.folder / "config.json"
        text = config.read_text()
        with self._ledger.window("broken configuration"):
            _replace(config, text[: self._random.randrange(len(text))])
            await trio.sleep(1)
            _replace(config, text)
            await trio.sleep(1)

    async def kill_worker(self) -> None:
        children = [each for each in self._parts.project.children() if each.is_running()]
        if not children:
            self._ledger.find("the project has no processes")
            return
        clients = self._parts.of_project
        allowed = (CallOutcome.LOST, CallOutcome.REFUSED)
        with self._ledger.window("kill -9 of a worker", *allowed, clients=clients, after_seconds=RECOVERY_SECONDS):
            self._random.choice(children).kill()
            await trio.sleep(1)

    async def restart(self) -> None:
        await self._restart(self._parts.everything, "restart")

    async def restart_project(self) -> None:
        await self._restart(self._parts.project, "restart of the project")

    async def _restart(self, server: Server, why: str) -> None:
        number = self._random.choice((signal.SIGTERM, signal.SIGINT))
        away = (CallOutcome.UNREACHED, CallOutcome.REFUSED, CallOutcome.MISSING)
        with (
            self._ledger.window(f"{why} by {number.name}", *away, after_seconds=RECOVERY_SECONDS),
            # A proxy accepts first, and then finds that the server does not listen.
            self._ledger.window(
                "no server behind the proxy", CallOutcome.LOST, clients=self._parts.through, after_seconds=1
            ),
        ):
            code = await trio.to_thread.run_sync(server.stop, number)
            if code and not (code == 1 and self._attacked):
                self._ledger.find(f"{why}: the exit code was {code}")
            await trio.to_thread.run_sync(server.start)

    async def pause(self) -> None:
        server = self._random.choice((self._parts.everything, self._parts.project))
        with self._ledger.window("SIGSTOP"):
            os.kill(server.pid, signal.SIGSTOP)
            try:
                await trio.sleep(self._random.uniform(0.5, 3))
            finally:
                os.kill(server.pid, signal.SIGCONT)

    async def cut(self) -> None:
        allowed = (CallOutcome.LOST, CallOutcome.UNREACHED)
        with self._ledger.window("cut", *allowed, clients=self._parts.through, after_seconds=1):
            for _ in range(self._random.randint(1, 5)):
                self._random.choice(self._parts.proxies).cut()
                await trio.sleep(self._random.uniform(0, 0.3))

    async def delay(self) -> None:
        proxy = self._random.choice(self._parts.proxies)
        with self._ledger.window("delays"):
            proxy.delay_seconds = self._random.uniform(0.01, 0.5)
            await trio.sleep(3)
            proxy.delay_seconds = 0.0

    async def half_close(self) -> None:
        allowed = (CallOutcome.LOST, CallOutcome.UNREACHED)
        with self._ledger.window("half-closes", *allowed, clients=self._parts.through, after_seconds=2):
            for _ in range(3):
                await self._random.choice(self._parts.proxies).half_close(self._random)
                await trio.sleep(0.1)

    async def fill_disk(self) -> None:
        assert self._parts.disk is not None
        filler = self._parts.disk / "filler"
        with self._ledger.window("full disk"):
            try:
                await trio.to_thread.run_sync(_fill, filler)
                await trio.sleep(self._random.uniform(1, 7))
            finally:
                filler.unlink(missing_ok=True)

    async def jump(self) -> None:
        assert self._parts.clock is not None
        with self._ledger.window("clock jump"):
            self._parts.clock.write_text(self._random.choice(("+0", "+40d", "-40d", "+3", "-3", "+3600", "-3600")))
            await trio.sleep(2)

    async def attack(self) -> None:
        name = self._random.choice([*ATTACKS])
        server = self._parts.everything
        command = [sys.executable, "-m", "tests.attacks.attacks", name, str(server.grpc), str(server.rest)]
        self._attacked = True
        with self._ledger.window(f"attack: {name}"), trio.move_on_after(HOSTILE_SECONDS) as patience:
            await trio.run_process(command, check=False, capture_stdout=True, capture_stderr=True)
        self._attacked = False
        if patience.cancelled_caught:
            self._ledger.find(f"attack {name}: not over in {HOSTILE_SECONDS:.0f} s")


def _replace(path: Path, text: str) -> None:
    replacement = path.with_suffix(".new")
    replacement.write_text(text)
    replacement.replace(path)


def _fill(path: Path) -> None:
    try:
        with path.open("wb") as file:
            while True:
                file.write(bytes(2**16))
                file.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
