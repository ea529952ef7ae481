from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from ovmstrio.client import open_client
from ovmstrio.core.errors import NotSupported, SequenceRestored
from tests.support import ir
from tests.support.processes import run_ovms, serving
from tests.support.waits import WAIT_SECONDS, until


def _rest(address: str, value: float, client: Any = httpx, **control: int) -> httpx.Response:
    inputs: list[dict[str, Any]] = [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [value, value]}]
    datatypes = {"sequence_id": "UINT64", "sequence_control_input": "UINT32"}
    inputs += [
        {"name": name, "datatype": datatypes[name], "shape": [1], "data": [number]} for name, number in control.items()
    ]
    answer: httpx.Response = client.post(f"{address}/v2/models/m/infer", json={"inputs": inputs}, timeout=WAIT_SECONDS)
    return answer


def _sum(response: httpx.Response) -> float:
    assert response.status_code == 200, response.text
    return float(response.json()["outputs"][0]["data"][0])


def _options(tmp_path: Path, *options: str) -> list[str]:
    base = ir.save(ir.accumulator(), tmp_path, "m")
    kept = str(tmp_path / "kept")
    return ["--model_name", "m", "--model_path", str(base), "--stateful", "--sequence_store", kept, *options]


def _triton(address: str, value: float, **control: Any) -> Any:
    from tritonclient.grpc import InferenceServerClient, InferInput

    given = InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.full((1, 2), value, np.float32))
    with InferenceServerClient(address) as client:
        result = client.infer("m", [given], **control)
    return float(result.as_numpy("y")[0, 0]), result.as_numpy("sequence_id").tolist()


def test_sequences_over_rest_and_grpc_survive_a_restart(tmp_path: Path) -> None:
    options = _options(tmp_path)
    with serving(*options) as server:
        started = _rest(server.rest, 1, sequence_control_input=1)
        assert _sum(started) == 1
        identity = {"name": "sequence_id", "datatype": "UINT64", "shape": [1], "data": [1]}
        assert started.json()["outputs"][1] == identity
        assert _triton(server.grpc, 2, sequence_id=1) == (3.0, [1])
        assert _triton(server.grpc, 9, sequence_id=40, sequence_start=True) == (9.0, [40])
        assert _triton(server.grpc, 1, sequence_id=40, sequence_end=True) == (10.0, [40])
        missing = _rest(server.rest, 1, sequence_id=40)
        assert (missing.status_code, missing.json()) == (404, {"error": "Sequence with provided ID does not exist"})
        (listed,) = server.get("/v2/models/m/sequences").json()["sequences"]
        assert (listed["id"], listed["requests"]) == (1, 2)
        assert 0 <= listed["idle_seconds"] <= listed["age_seconds"] < 60
        assert server.get("/v2/models/m/versions/1/sequences").status_code == 200
        output = run_ovms("sequence", "list", "m", "--json", "--url", server.rest)
        assert [(each["id"], each["requests"]) for each in json.loads(output.stdout)] == [(1, 2)]
        table = run_ovms("sequence", "list", "m", "--version", "1", "--url", server.rest).stdout
        assert table.split()[:4] == ["sequence", "age", "idle", "requests"]
        assert "2" in table.splitlines()[1].split()
        assert run_ovms("sequence", "list", "n", "--url", server.rest).returncode == 1
        with open_client(server.grpc) as client, pytest.raises(NotSupported, match="use REST"):
            client.sequences("m")
        assert server.get("/v2/models/n/sequences").status_code == 404
        assert server.stop(signal.SIGTERM)[0] == 0
    with serving(*options) as server:
        assert _sum(_rest(server.rest, 4, sequence_id=1)) == 7
        assert _sum(_rest(server.rest, 1, sequence_id=1, sequence_control_input=2)) == 8
        assert server.get("/v2/models/m/sequences").json() == {"sequences": []}


def test_killed_server_keeps_stored_steps(tmp_path: Path) -> None:
    options = _options(tmp_path, "--sequence_flush_seconds", "1")
    with serving(*options) as server:
        second = run_ovms("serve", "--port", "0", "--rest_bind_address", "127.0.0.1", "--rest_port", "1", *options)
        output = " ".join((second.stdout + second.stderr).split())
        assert second.returncode == 1
        assert f"process {server.process.pid} on" in output
        assert "serving m" in output
        assert "set another folder" in output
        done = 0
        file, stored = tmp_path / "kept" / "sequences.bin", set[int]()
        with httpx.Client() as client:
            while len(stored) < 3:
                control = {"sequence_id": 7} if done else {"sequence_id": 7, "sequence_control_input": 1}
                assert _sum(_rest(server.rest, 1, client=client, **control)) == done + 1
                done += 1
                stored.update(map(int, re.findall(rb'"id":7,.*?"requests":(\d+)', file.read_bytes())))
        server.process.kill()
        server.process.wait(WAIT_SECONDS)
    with serving(*options) as server:
        (listed,) = server.get("/v2/models/m/sequences").json()["sequences"]
        kept = listed["requests"]
        assert max(stored) <= kept <= done
        assert listed["lost_seconds"] == 1
        refused = _rest(server.rest, 1, sequence_id=7)
        assert (refused.status_code, refused.headers["ovmstrio_restored_steps"]) == (409, str(kept))
        assert f"sequence 7 was restored with {kept} steps" in refused.json()["error"]
        for count in range(kept, done + 1):
            assert _sum(_rest(server.rest, 1, sequence_id=7)) == count + 1
        code, printed = server.stop()
    assert code == 0
    (line,) = [line for line in printed.splitlines() if "sequences restored" in line]
    assert "sequences=1" in line
    assert "lost_seconds=1.0" in line
    assert 0 < float(line.split("written_seconds_ago=")[1].split()[0]) < 60
    with serving(*options) as server:
        assert _sum(_rest(server.rest, 1, sequence_id=7)) == done + 2


def _predict_rest(address: str, **control: int) -> httpx.Response:
    inputs = {"x": [[1.0, 1.0]]} | {name: [value] for name, value in control.items()}
    return httpx.post(f"{address}/v1/models/m:predict", json={"inputs": inputs}, timeout=WAIT_SECONDS)


def _grpc_step(address: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a step over gRPC; return the parameters of the response, and the metadata."""
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    message.raw_input_contents.append(np.ones((1, 2), np.float32).tobytes())
    message.parameters["sequence_id"].int64_param = number
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        response, call = stub.ModelInfer.with_call(message, timeout=WAIT_SECONDS)
        parameters = {name: value.int64_param for name, value in response.parameters.items()}
        return parameters, dict(call.trailing_metadata())


def _stream_step(address: str, number: int) -> tuple[str, dict[str, Any]]:
    """Make a step over a stream; return the error, and the parameters of the response."""
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    message.raw_input_contents.append(np.ones((1, 2), np.float32).tobytes())
    message.parameters["sequence_id"].int64_param = number
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (answer,) = stub.ModelStreamInfer(iter([message]), timeout=WAIT_SECONDS)
        parameters = {name: value.int64_param for name, value in answer.infer_response.parameters.items()}
        return answer.error_message, parameters


@contextmanager
def _killed_server(*options: str, numbers: tuple[int, ...]) -> Iterator[None]:
    """Start sequences, store two steps of each, and kill the server."""
    with serving(*options) as server:
        for number in numbers:
            assert _sum(_rest(server.rest, 1, sequence_id=number, sequence_control_input=1)) == 1
            assert _sum(_rest(server.rest, 1, sequence_id=number)) == 2
        folder = Path(options[options.index("--sequence_store") + 1])

        def are_stored() -> bool:
            found = b"".join(file.read_bytes() for file in folder.rglob("sequences.bin"))
            return all(re.search(b'"id":%d,[^{}]*"requests":2' % number, found) for number in numbers)

        until(are_stored)
        parent = psutil.Process(server.process.pid)
        for process in [*parent.children(recursive=True), parent]:
            process.kill()
        server.process.wait(WAIT_SECONDS)
    yield


@pytest.mark.parametrize("workers", ["1", "2"])
def test_each_protocol_reports_the_steps_that_a_killed_server_had_stored(tmp_path: Path, workers: str) -> None:
    options = _options(tmp_path, "--sequence_flush_seconds", "0.2", "--workers", workers)
    name = "ovmstrio_restored_steps"
    with _killed_server(*options, numbers=(1, 2, 3, 4, 5, 6, 7)), serving(*options) as server:
        refused = _predict_rest(server.rest, sequence_id=1)
        assert (refused.status_code, refused.headers[name]) == (409, "2")
        answered = _predict_rest(server.rest, sequence_id=1)
        assert answered.json()["outputs"]["y"] == [[3.0, 3.0]]
        assert answered.headers[name] == "2"
        assert name not in _predict_rest(server.rest, sequence_id=1).headers

        with pytest.raises(grpc.RpcError) as info:
            _grpc_step(server.grpc, 2)
        assert info.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "sequence 2 was restored with 2 steps" in info.value.details()
        assert (name, "2") in info.value.trailing_metadata()
        parameters, metadata = _grpc_step(server.grpc, 2)
        assert (parameters, metadata[name]) == ({name: 2}, "2")
        parameters, metadata = _grpc_step(server.grpc, 2)
        assert parameters == {}
        assert name not in metadata

        error, parameters = _stream_step(server.grpc, 3)
        assert "sequence 3 was restored with 2 steps" in error
        assert parameters == {name: 2}
        assert _stream_step(server.grpc, 3) == ("", {name: 2})
        assert _stream_step(server.grpc, 3) == ("", {})

        for number, address, rest in ((6, server.rest, True), (7, server.grpc, False)):
            with open_client(address, rest=rest) as client:
                row = {"x": np.ones((1, 2), np.float32)}
                with pytest.raises(SequenceRestored) as caught:
                    client.infer("m", row, parameters={"sequence_id": number})
                assert caught.value.steps == 2
                assert client.infer("m", row, parameters={"sequence_id": number})["y"].tolist() == [[3, 3]]

        assert _sum(_rest(server.rest, 5, sequence_id=4, sequence_control_input=1)) == 5
        refused = _rest(server.rest, 1, sequence_id=5, sequence_control_input=2)
        assert (refused.status_code, refused.headers[name]) == (409, "2")
        ended = _rest(server.rest, 1, sequence_id=5, sequence_control_input=2)
        assert (_sum(ended), ended.headers[name], ended.json()["parameters"]) == (3, "2", {name: 2})


def test_steps_continue_with_the_number_of_restored_ones_where_that_is_chosen(tmp_path: Path) -> None:
    options = _options(tmp_path, "--sequence_flush_seconds", "0.2", "--sequence_restore", "continue")
    with _killed_server(*options, numbers=(1,)), serving(*options) as server:
        answered = _rest(server.rest, 1, sequence_id=1)
        assert (_sum(answered), answered.headers["ovmstrio_restored_steps"]) == (3, "2")
        assert answered.json()["parameters"] == {"ovmstrio_restored_steps": 2}
        assert "ovmstrio_restored_steps" not in _rest(server.rest, 1, sequence_id=1).headers


def test_unsaved_sequences_are_a_failure_of_the_server(tmp_path: Path) -> None:
    options = _options(tmp_path, "--sequence_flush_seconds", "0.2")
    with serving(*options) as server:
        assert _sum(_rest(server.rest, 5, sequence_id=3, sequence_control_input=1)) == 5
        file = tmp_path / "kept" / "sequences.bin"
        until(lambda: b'"id":3' in file.read_bytes())
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (100, 100))
        assert _sum(_rest(server.rest, 5, sequence_id=3)) == 10
        code, printed = server.stop()
        assert (code, "sequences not saved" in printed) == (1, True)
        assert "File too large" in printed
    with serving(*options) as server:
        refused = _rest(server.rest, 1, sequence_id=3)
        assert (refused.status_code, refused.headers["ovmstrio_restored_steps"]) == (409, "1")
        assert _sum(_rest(server.rest, 1, sequence_id=3)) == 6
