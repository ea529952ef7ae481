"""Changes of the server that are refused: the log tells who asked for what, from where, within bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import trio

from ovmstrio.access.key_file import write_key_file
from ovmstrio.core.errors import Unauthenticated
from ovmstrio.observability.logs import configure_logs
from ovmstrio.observability.refused_changes import bounded_refusals, tell_refused
from tests.service.server.test_traces import ask, serving
from tests.support.all_kinds import write_all_kinds
from tests.support.api_clients import triton_module
from tests.support.callers import bearer, entry_of, peer_at

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OVER_REST = {
    "/v1/config/reload": "POST /v1/config/reload",
    "/v2/repository/models/model/load": "POST /v2/repository/models/<model>/load",
    "/v2/repository/models/model/unload": "POST /v2/repository/models/<model>/unload",
    "/v2/logging": "POST /v2/logging",
    "/v2/systemsharedmemory/region/r/register": "POST /v2/systemsharedmemory/region/<region>/register",
    "/v2/profile": "POST /v2/profile",
    "/console/api/reload": "POST /console/api/reload",
}
_KSERVE = "inference.GRPCInferenceService/"
OVER_GRPC: dict[str, Callable[[Any, dict[str, str]], object]] = {
    "RepositoryModelLoad": lambda client, headers: client.load_model("model", headers=headers),
    "RepositoryModelUnload": lambda client, headers: client.unload_model("model", headers=headers),
    "LogSettings": lambda client, headers: client.update_log_settings({"log_info": True}, headers=headers),
    "SystemSharedMemoryRegister": lambda client, headers: client.register_system_shared_memory(
        "r", "/r", 8, headers=headers
    ),
}


def _lines(path: Path, event: str = "change refused") -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == event]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Give the file of the log, in JSON."""
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path)
    return path


def _serve(tmp_path: Path) -> Any:
    keys = tmp_path / "keys.json"
    write_key_file(keys, [entry_of("shop", "infer:*", "read")])
    return serving(write_all_kinds(tmp_path), keys_file=keys)


@pytest.mark.parametrize(("caller", "status"), [("", 401), ("stranger", 401), ("shop", 403)])
async def test_each_refusal_over_rest_is_a_line(tmp_path: Path, log: Path, caller: str, status: int) -> None:
    """With the caller, if it is known, and never with what it has shown."""
    async with _serve(tmp_path) as server:
        for path in OVER_REST:
            answer = await ask(server, "POST", path, json={}, headers=bearer(caller) if caller else {})
            assert answer.status_code == status
    whose = caller if status == 403 else ""
    told = [(line["change"], line["caller"], line["client"], line["level"]) for line in _lines(log)]
    assert told == [(change, whose, "127.0.0.1", "warning") for change in OVER_REST.values()]
    by_path = {line.get("about", line["change"]) for line in _lines(log)}
    assert "POST /v2/repository/models/model/load" in by_path
    assert not [line for line in _lines(log) if "stranger" in str(line)]


@pytest.mark.parametrize("caller", ["", "shop"])
async def test_each_refusal_over_grpc_is_a_line(tmp_path: Path, log: Path, caller: str) -> None:
    """Log settings, which whoever may read may ask for, only where they were to be changed, or nobody knows that."""
    triton = triton_module("grpc")
    headers = bearer(caller) if caller else {}

    def ask_all(address: str) -> None:
        with triton.InferenceServerClient(address) as client:
            for each in OVER_GRPC.values():
                with pytest.raises(triton.InferenceServerException, match=r"UNAUTHENTICATED|PERMISSION_DENIED"):
                    each(client, headers)

    async with _serve(tmp_path) as server:
        await trio.to_thread.run_sync(ask_all, server.grpc[0])
    told = [(line["change"], line["caller"], line["client"]) for line in _lines(log)]
    names = {name: f"{_KSERVE}{name}" for name in OVER_GRPC}
    if caller:
        names["LogSettings"] = "log settings"
    assert told == [(name, caller, "127.0.0.1") for name in names.values()]


async def test_the_same_refused_again_and_again_is_a_number(tmp_path: Path, log: Path) -> None:
    """Told at the end of a minute, or of the server."""
    async with _serve(tmp_path) as server:
        for number in range(20):
            await ask(server, "POST", f"/v2/repository/models/m{number}/load", json={})
    (first,) = _lines(log)
    assert first["about"] == "POST /v2/repository/models/m0/load"
    (repeated,) = _lines(log, "fault repeated")
    assert (repeated["fault"], repeated["peer"], repeated["times"]) == ("change refused", "127.0.0.1", 19)


async def test_many_hosts_do_not_fill_the_log(log: Path) -> None:
    """Beyond a number they are counted together."""
    with bounded_refusals() as refusals:
        for number in range(5000):
            error = Unauthenticated("who calls must be known")
            tell_refused("reload", error, client=peer_at(f"10.0.{number // 250}.{number % 250}").address)
        with trio.CancelScope() as scope:
            scope.cancel()
            await refusals.sum_up()
    lines, repeated = _lines(log), _lines(log, "fault repeated")
    assert len(lines) <= 201
    assert len(lines) + sum(each["times"] for each in repeated) == 5000
