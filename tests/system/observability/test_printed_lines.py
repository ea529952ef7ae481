"""Output of user code under the real command: each line is a log record with the name of the service."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.support.system_servers import SystemServers
from tests.support.waits import WAIT_SECONDS, until

SENT = {"inputs": [{"name": "in", "shape": [3], "datatype": "UINT8", "data": [1, 2, 3]}]}
ROW = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
OPS = {"key": ["x"], "value": ["a"]}
CALLS: list[tuple[str, Any]] = [
    *((f"/v2/models/{name}/infer", SENT) for name in ("graph", "apart")),
    *((f"/{name}", [1]) for name in ("handler", "handler_apart")),
    *((f"/{name}/prediction", OPS) for name in ("ops", "ops_apart")),
    ("/v2/models/double/infer", ROW),
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
        whole_lines = server.printed_so_far().rpartition("\n")[0].splitlines()
        return {
            (
                line["event"],
                line.get("servable"),
                line.get("node") or line.get("op") or line.get("handler"),
                line["stream"],
            )
            for line in map(json.loads, whole_lines)
            if line["logger"] == "ovmstrio.printed"
        }

    until(lambda: len(printed()) >= len(EXPECTED), why=printed)
    assert printed() == EXPECTED
