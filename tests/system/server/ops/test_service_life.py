from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.ops import Op, RequestOp, ResponseOp, WebService
from ovmstrio.protocol.pipeline_messages import METHOD, REQUEST, RESPONSE
from ovmstrio.runtimes.kind import LoadContext
from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings
from ovmstrio.runtimes.ops.op_kind import OpPipelineKind
from ovmstrio.runtimes.ops.op_service import OpService
from ovmstrio.runtimes.ops.process_info import list_processes
from ovmstrio.runtimes.resident import host
from ovmstrio.runtimes.table import KINDS
from ovmstrio.server.hosting import Hosting
from ovmstrio.server.life import serve_plan
from ovmstrio.server.plan import Plan
from ovmstrio.server.run_service import run_script_service
from ovmstrio.server.running import Running
from ovmstrio.server.service_plan import plan_service, service_settings
from ovmstrio.server.start_failures import leaves
from tests.support.api_clients import call
from tests.support.op_pipelines import EchoExecutor, executor_plan
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedPlan, serving_plan
from tests.support.waits import WAIT_SECONDS

RESPONSE_NAME = RESPONSE.DESCRIPTOR.full_name


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every server in a folder of its own, where its files are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_HOME", raising=False)


class _Doubling(Op):
    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        ((_, given),) = input_dicts.items()
        return {"y": np.array([[float(given["x"])]], np.float32) * 2}, False, None, ""


class _Service(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        return _Doubling(name="double", input_ops=[read_op])


def prepared(service: WebService | None = None, **config: Any) -> WebService:
    """Give a service with these settings."""
    service = service or _Service(name="uci")
    service.prepare_pipeline_config(yml_dict=config)
    return service


def plan_of(service: WebService, **options: Any) -> Plan:
    """Plan to serve a service on the loopback interface."""
    return plan_service(service, service_settings({"grpc_bind_address": "127.0.0.1", **options}))


def serving(service: WebService, **options: Any) -> AbstractAsyncContextManager[ServedPlan]:
    """Serve on the loopback interface until the block ends, which is gentle."""
    return serving_plan(plan_of(service, **options), drains=True)


async def ask(address: str, **fields: Any) -> Any:
    """Make one call over gRPC."""
    return await call(address, METHOD, REQUEST(key=["x"], value=["2"], **fields), RESPONSE_NAME)


async def refusals(service: WebService, **options: Any) -> str:
    """Give why a service is not served."""
    with pytest.raises((ConfigError, ExceptionGroup)) as raised:
        await serve_plan(plan_service(service, service_settings(options)), handle_signals=False)
    (error,) = leaves(raised.value)
    assert isinstance(error, ConfigError)
    return str(error)


async def test_grpc_alone() -> None:
    """With ``rpc_port`` alone there is gRPC and no HTTP."""
    async with serving(prepared(rpc_port=0)) as running:
        answer = await ask(running.grpc[0], name="uci")
        assert running.rest == []
    assert list(answer.value) == ["array([[4.]], dtype=float32)"]


async def test_http_alone() -> None:
    """With ``http_port`` alone gRPC has the next port that is free."""
    (port,) = free_ports(1)
    async with serving(prepared(http_port=port)) as running, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/uci/prediction", json={"key": ["x"], "value": [2]})
        assert int(running.grpc[0].rpartition(":")[2]) > port
        assert (await ask(running.grpc[0])).err_no == 0
    assert answer.json()["value"] == ["array([[4.]], dtype=float32)"]


async def test_ports_of_the_command_line_go_before_those_of_the_file() -> None:
    """What the options say takes the place of what the configuration says, and the file tells the real ports."""
    rpc, http = free_ports(2)
    async with serving(prepared(rpc_port=9998, http_port=18082), port=rpc, rest_port=http) as running:
        assert (running.grpc, running.rest) == ([f"127.0.0.1:{rpc}"], [f"127.0.0.1:{http}"])
        assert [entry.port for entry in list_processes()] == [[rpc, http]]
    assert list_processes() == []


async def test_what_keeps_a_service_from_being_served(tmp_path: Path) -> None:
    """Ports, configurations, Ops and preparation: each is told, and nothing is left in the way."""
    assert "both missing" in await refusals(prepared(worker_num=1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use" in await refusals(prepared(rpc_port=port))
    nowhere = {"double": {"local_service_conf": {"model_config": "nowhere"}}}
    told = "op.double.local_service_conf.model_config: no such file or folder"
    assert f"yml_dict: {told}" in await refusals(prepared(rpc_port=0, op=nowhere))
    file = tmp_path / "own.yml"
    file.write_text(f"rpc_port: 0\nop: {nowhere}\n")
    service = _Service(name="uci")
    service.prepare_pipeline_config(str(file))
    assert f"{file}:2: {told}" in await refusals(service)
    service.prepare_pipeline_config(str(tmp_path / "nope.yml"))
    assert "nope.yml" in await refusals(service)
    assert "prepare_pipeline_config" in await refusals(_Service())

    class Failing(_Doubling):
        def init_op(self) -> None:
            raise LookupError("no dictionary")

    class Service(WebService):
        def get_pipeline_response(self, read_op: Op) -> Op:
            return Failing(name="bad", input_ops=[read_op])

    assert "no dictionary" in await refusals(prepared(Service(), rpc_port=0))


def test_a_service_that_cannot_start_ends_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is on standard error, and the exit code is 1."""
    monkeypatch.setattr("ovmstrio.server.run_service.configure_logs", lambda: None)
    with pytest.raises(SystemExit) as ended:
        run_script_service(prepared(worker_num=1))
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: yml_dict: rpc_port and http_port are both missing")


class _OnlyPrediction(RequestOp):
    def unpack_request_package(self, request: Any) -> Any:
        if request.method != "prediction":
            raise ValueError("request method error")
        return dict(zip(request.key, request.value, strict=True)), request.logid, None, ""


class _Shouting(ResponseOp):
    def pack_response_package(self, channeldata: Any) -> Any:
        response = RESPONSE()
        for name, value in channeldata.parse().items():
            response.key.append(name.upper())
            response.value.append(repr(value))
        response.err_no, response.err_msg = channeldata.error_code, channeldata.error_info
        return response


async def test_first_and_last_ops_of_ones_own() -> None:
    """A service may read requests and write answers itself, the latter as messages; what it raises is error 8000."""

    class Service(WebService):
        def get_pipeline_response(self, read_op: Op) -> Op:
            return _Shouting(input_ops=[_Doubling(name="double", input_ops=[_OnlyPrediction()])])

    async with serving(prepared(Service(name="uci"), rpc_port=0)) as running:
        answer = await ask(running.grpc[0], method="prediction")
        assert (list(answer.key), list(answer.value)) == (["Y"], ["array([[4.]], dtype=float32)"])
        refused = await ask(running.grpc[0], method="other")
        assert (refused.err_no, refused.err_msg) == (8000, "rpc package error: request method error")


async def test_a_nameless_service() -> None:
    """A service without a name answers requests that name none, and KServe v2 knows it as ``pipeline``."""
    async with (
        serving(prepared(_Service(name=""), rpc_port=0, http_port=0)) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", trust_env=False) as client,
    ):
        assert (await ask(running.grpc[0])).err_no == 0
        assert (await client.post("/uci/prediction", json={})).json()["err_no"] == 3002
        assert (await client.get("/v2/models/pipeline")).status_code == 200
        assert (await client.get("/trace")).json()["codes"] == {"0": 1}


async def test_the_file_system_may_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for ``ProcessInfo.json`` that is none ends the start."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SERVING_HOME", str(tmp_path / "file" / "folder"))
    with pytest.raises(ExceptionGroup) as raised:
        await serve_plan(plan_of(prepared(rpc_port=0)), handle_signals=False)
    assert raised.value.subgroup(OSError) is not None


class _Waiting(Op):
    gates: ClassVar[dict[str, trio.Event]] = {}
    arrived: ClassVar[dict[str, trio.Event]] = {}

    async def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        ((_, given),) = input_dicts.items()
        if given["x"] in self.gates:
            self.arrived[given["x"]].set()
            await self.gates[given["x"]].wait()
        return {"y": given["x"]}, False, None, ""


class _WaitingService(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        _Waiting.gates, _Waiting.arrived = {"gate": trio.Event()}, {"gate": trio.Event()}
        return _Waiting(name="wait", input_ops=[read_op])


async def post(running: ServedPlan, x: str, answers: dict[str, Any] | None = None) -> Any:
    """Make one call over HTTP, whose answer is kept by its text where there is room for it."""
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client:
        answer = await client.post(f"http://{running.rest[0]}/uci/prediction", json={"key": ["x"], "value": [x]})
    if answers is not None:
        answers[x] = answer.json()
    return answer.json()


async def test_the_end_answers_everybody() -> None:
    """A server that drains finishes what it works on, and answers what waits for its turn with 3001."""
    answers: dict[str, Any] = {}
    service = prepared(_WaitingService(name="uci"), rpc_port=0, http_port=0, worker_num=1)
    async with trio.open_nursery() as nursery, serving(service) as running:
        nursery.start_soon(post, running, "gate", answers)
        await _Waiting.arrived["gate"].wait()
        nursery.start_soon(post, running, "queued", answers)
        await trio.testing.wait_all_tasks_blocked(0.1)
        running.drain()
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (answers["queued"]["err_no"], answers["queued"]["err_msg"]) == (3001, "dag closed.")
        assert "gate" not in answers
        _Waiting.gates["gate"].set()
    assert answers["gate"]["value"] == ["gate"]


async def test_a_client_that_leaves_makes_room() -> None:
    """The only place in a pipeline is free again once the client of its request has gone."""
    service = prepared(_WaitingService(name="uci"), rpc_port=0, http_port=0, worker_num=1)
    async with serving(service) as running:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, running, "gate")
            await _Waiting.arrived["gate"].wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(WAIT_SECONDS):
            assert (await post(running, "next"))["value"] == ["next"]


class _Lingering(OpPipelineKind):
    def __init__(self) -> None:
        super().__init__()
        self.executor = EchoExecutor()
        self.ending, self.go = trio.Event(), trio.Event()

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        del version, directory
        return await host(context.tasks, self._opened(spec, context), kind=self.name, name=spec.name)

    @asynccontextmanager
    async def _opened(self, spec: OpPipelineSpec, context: LoadContext) -> AsyncIterator[OpService]:
        del context
        try:
            yield OpService(spec.name, self.executor, None, PipelineSettings())
        finally:
            with trio.CancelScope(shield=True):
                self.ending.set()
                await self.go.wait()


async def test_a_signal_while_workers_are_closed() -> None:
    """A server that has been drained is not drained again, and a signal then does not change how it has ended."""
    kind, until = _Lingering(), trio.Event()
    plan = replace(executor_plan(kind.executor), kinds={**KINDS, OpPipelineKind.name: kind})
    results: list[bool] = []

    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        results.append(await serve_plan(plan, Hosting(until=until.wait), task_status=task_status))

    with capture_logs() as logged:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve)
            until.set()
            await kind.ending.wait()
            signal.raise_signal(signal.SIGTERM)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert results == []
            kind.go.set()
    assert results == [True]
    assert [entry["event"] for entry in logged].count("drained") == 1
