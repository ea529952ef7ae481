from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trio
from google.protobuf import empty_pb2

from ovmstrio.telemetry.logs import configure_logs
from tests.support.all_kinds import write_all_kinds
from tests.support.served_in_thread import ServedPlan
from tests.support.traced_servers import GRAPH_BODY, infer_body, request, serving

ID = "x-request-id"
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/v2/models/model/infer", infer_body()),
    ("POST", "/v2/models/model/infer", {"inputs": []}),
    ("POST", "/v2/models/nothing/infer", {"inputs": []}),
    ("POST", "/v2/models/graph/infer", GRAPH_BODY),
    ("POST", "/v2/models/graph/generate_stream", {"in": "x"}),
    ("GET", "/v2/models/model", None),
    ("GET", "/v1/models/model", None),
    ("POST", "/v1/models/model:predict", {"instances": [[1.0] * 10]}),
    ("POST", "/v1/models/model:predict", {}),
    ("POST", "/v3/chat/completions", {"model": "nothing", "messages": []}),
    ("GET", "/v2/health/ready", None),
    ("GET", "/nothing/here", None),
    ("POST", "/handler", [1, 2]),
    ("POST", "/handler", ["no number"]),
    ("POST", "/ops/prediction", {"key": ["x"], "value": ["1"]}),
]


async def _ids(server: ServedPlan, **headers: str) -> list[str | None]:
    answers = [await request(server, method, path, json=body, headers=headers) for method, path, body in CALLS]
    return [answer.headers.get(ID) for answer in answers]


async def test_every_rest_response_has_the_id_of_the_client_or_a_new_one(tmp_path: Path) -> None:
    configure_logs()
    async with serving(write_all_kinds(tmp_path)) as server:
        sent = await _ids(server, **{ID: "mine-1"})
        made = await _ids(server)
        unsafe = await _ids(server, **{ID: "not safe"})
    assert sent == ["mine-1"] * len(CALLS)
    assert None not in made
    # The message of the first call has an id itself.
    assert made[0] == unsafe[0] == infer_body()["id"]
    assert len({*made[1:], *unsafe[1:]}) == 2 * len(CALLS) - 2


@pytest.mark.parametrize("method", ["GRPCInferenceService/ModelReady", "GRPCInferenceService/ModelInfer"])
async def test_every_grpc_response_has_the_id_in_its_initial_metadata(tmp_path: Path, method: str) -> None:
    configure_logs()
    async with serving(write_all_kinds(tmp_path)) as server:
        sent = await trio.to_thread.run_sync(_grpc_id, server.grpc[0], method, "mine-2")
        made = [await trio.to_thread.run_sync(_grpc_id, server.grpc[0], method, "") for _ in range(2)]
    assert sent == "mine-2"
    assert all(made)
    assert made[0] != made[1]


def _grpc_id(address: str, method: str, sent: str) -> str:
    metadata = ((ID, sent),) if sent else ()
    with grpc.insecure_channel(address) as channel:
        send = channel.unary_unary(
            f"/inference.{method}",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=empty_pb2.Empty.FromString,
        )
        # A message without a name fails.
        call = send.future(empty_pb2.Empty(), metadata=metadata, timeout=60)
        call.exception()
        found = {**dict(call.initial_metadata() or ()), **dict(call.trailing_metadata() or ())}
    return str(found.get(ID, ""))


async def test_log_and_access_log_have_the_id_of_the_response(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    configure_logs(fmt="json", path=path, level="DEBUG")
    async with serving(write_all_kinds(tmp_path), access_log="json") as server:
        answers: list[httpx.Response] = []
        for headers in ({ID: "mine-3"}, {}):
            for _, where, body in CALLS[:4]:
                answers.append(await request(server, "POST", where, json=body, headers=headers))
    ids = [answer.headers[ID] for answer in answers]
    accesses = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"time"')]
    assert [each["request_id"] for each in accesses] == ids
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    logged = [each["request_id"] for each in lines if each["event"] in ("request", "request refused")]
    served = [each for each, answer in zip(ids, answers, strict=True) if answer.status_code != 404]
    assert logged == served
