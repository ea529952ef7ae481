from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import trio
import trio.testing

from ovmstrio.core.resource_registry import owned_by
from ovmstrio.isolation.worker_process import WorkerProcess
from tests.support import ir
from tests.support.processes import serving
from tests.support.scripted_worker import PROGRAM
from tests.support.system_servers import SystemServers
from tests.support.waits import WAIT_SECONDS, until
from tests.support.worker_clients import ROW
from tests.unit.telemetry.test_metrics import figures, watching


async def test_processes_of_a_service_are_counted_with_their_memory_and_ends() -> None:
    metrics = watching()
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for restarts, ends in enumerate((False, True)):
                with owned_by("mine"):
                    process = WorkerProcess(PROGRAM)
                await process.start(nursery, "work")
                found = figures(metrics, "mine")
                assert found.pop("worker_memory_bytes") > 2**20
                assert found == {"worker_processes": 1, "worker_restarts_total": 0}
                if ends:
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGKILL)
                    await process.ended.wait()
                else:
                    await process.close(5)
                assert figures(metrics, "mine") == {"worker_restarts_total": restarts}


# Printed lines


SENT = {"inputs": [{"name": "in", "shape": [3], "datatype": "UINT8", "data": [1, 2, 3]}]}
PAIR = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
OPS = {"key": ["x"], "value": ["a"]}
CALLS: list[tuple[str, Any]] = [
    *((f"/v2/models/{name}/infer", SENT) for name in ("graph", "apart")),
    *((f"/{name}", [1]) for name in ("handler", "handler_apart")),
    *((f"/{name}/prediction", OPS) for name in ("ops", "ops_apart")),
    ("/v2/models/double/infer", PAIR),
]
EXPECTED = {
    ("from graph", "graph", "node", "stdout"),
    ("from graph", "apart", "node", "stdout"),
    ("from handler", None, "handler", "stderr"),
    ("from handler", None, "handler_apart", "stderr"),
    ("from a thread of the handler", None, None, "stdout"),
    ("from a thread of the handler", None, "handler_apart", "stdout"),
    ("from op", "ops", "count", "stdout"),
    ("from op", "ops_apart", "count", "stdout"),
    ("from node", None, "twice", "stdout"),
}


def test_printed_lines_are_log_records_with_the_name_of_the_service(servers: SystemServers) -> None:
    server = servers.serving("all_kinds")
    for path, body in CALLS:
        answer = httpx.post(server.rest + path, json=body, timeout=WAIT_SECONDS, trust_env=False)
        assert answer.status_code == 200, (path, answer.text)

    def printed() -> set[tuple[str | None, ...]]:
        split_lines = server.printed_so_far().rpartition("\n")[0].splitlines()
        lines = [line for line in map(json.loads, split_lines) if line["logger"] == "ovmstrio.printed"]
        parts = [line.get("node") or line.get("op") or line.get("handler") for line in lines]
        return {
            (line["event"], line.get("servable"), part, line["stream"]) for line, part in zip(lines, parts, strict=True)
        }

    until(lambda: len(printed()) >= len(EXPECTED), why=printed)
    assert printed() == EXPECTED


# Log records of user code


CODE = [
    ("graph", {"servable": "graph", "node": "node"}),
    ("graph", {"servable": "apart", "node": "node"}),
    ("handler", {"handler": "handler"}),
    ("handler", {"handler": "handler_apart"}),
    ("op", {"servable": "ops", "op": "count"}),
    ("op", {"servable": "ops_apart", "op": "count"}),
]


def test_log_records_of_user_code_in_threads_and_processes_are_logged_once_with_their_call(
    servers: SystemServers,
) -> None:
    server = servers.serving("all_kinds")
    known = len(server.printed_so_far())
    for path, body in CALLS:
        name = path.rstrip("/").split("/")[-2 if path.count("/") > 1 else -1]
        sent, headers = ({**body, "id": name} if "inputs" in body else body), {"x-request-id": name}
        answer = httpx.post(server.rest + path, json=sent, headers=headers, timeout=WAIT_SECONDS, trust_env=False)
        assert answer.status_code == 200, (path, answer.text)

    def records() -> list[Any]:
        lines = server.printed_so_far()[known:].rpartition("\n")[0].splitlines()
        found = [line for line in map(json.loads, lines) if line["logger"] == "user.code"]
        return [
            (
                line["event"],
                line["level"],
                {name: line[name] for name in ("servable", "node", "op", "handler", "request_id") if name in line},
                [(each["exc_type"], each["exc_value"]) for each in line.get("exception", ())],
            )
            for line in found
        ]

    expected = [
        record
        for name, names in CODE
        for fields in [{**names, "request_id": names.get("servable") or names["handler"]}]
        for record in (
            (f"{name} began", "info", fields, []),
            (f"{name} failed", "error", fields, [("KeyError", f"'{name}'")]),
        )
    ]
    until(lambda: len(records()) >= len(expected), why=records)
    assert sorted(records(), key=str) == sorted(expected, key=str)


# An unread log


def test_an_unread_log_stops_neither_calls_nor_the_drain(tmp_path: Path) -> None:
    """The test reads no output of its server, which is more than a pipe holds, and stops it: the server is its own."""
    model = ("--model_name", "m", "--model_path", str(ir.save(ir.dummy(), tmp_path, "m")))
    with serving(*model, "--log_level", "DEBUG") as server:
        with httpx.Client(base_url=server.rest, timeout=WAIT_SECONDS) as client:
            for _ in range(1500):
                client.post("/v2/models/m/infer", json=ROW).raise_for_status()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=WAIT_SECONDS) == 0
