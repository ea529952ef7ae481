from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
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
from ovmstrio.encoding.messages import METHOD, REQUEST, RESPONSE
from ovmstrio.ext.ops import Op, WebService
from ovmstrio.ops.kind import OpPipelineKind
from ovmstrio.ops.op_service import OpService
from ovmstrio.ops.process_info import list_processes
from ovmstrio.ops.settings import PipelineSettings
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.plan import Plan
from ovmstrio.server.running import Running
from ovmstrio.server.server import serve_plan
from ovmstrio.server.service_plan import plan_service, service_settings
from ovmstrio.server.start_failures import flatten_errors
from ovmstrio.server.worker_context import WorkerProcessContext
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.serving.kind import LoadContext
from ovmstrio.workers.run_service import run_script_service
from tests.support.api_clients import call
from tests.support.op_pipelines import EchoExecutor, executor_plan
from tests.support.ports import free_ports
from tests.support.served_in_thread import ServedPlan, serving_plan
from tests.support.waits import WAIT_SECONDS

RESPONSE_NAME = RESPONSE.DESCRIPTOR.full_name


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SERVING_HOME", raising=False)


class _Doubling(Op):
    def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        ((_, given),) = input_dicts.items()
        return {"y": np.array([[float(given["x"])]], np.float32) * 2}, False, None, ""


class _Service(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        return _Doubling(name="double", input_ops=[read_op])


def _prepared(service: WebService | None = None, **config: Any) -> WebService:
    service = service or _Service(name="uci")
    service.prepare_pipeline_config(yml_dict=config)
    return service


def _plan_of(service: WebService, **options: Any) -> Plan:
    return plan_service(service, service_settings({"grpc_bind_address": "127.0.0.1", **options}))


def _serving(service: WebService, **options: Any) -> AbstractAsyncContextManager[ServedPlan]:
    return serving_plan(_plan_of(service, **options), drains=True)


async def _call(address: str, **fields: Any) -> Any:
    return await call(address, METHOD, REQUEST(key=["x"], value=["2"], **fields), RESPONSE_NAME)


async def _refusal(service: WebService, **options: Any) -> str:
    with pytest.raises((ConfigError, ExceptionGroup)) as raised:
        await serve_plan(plan_service(service, service_settings(options)), handle_signals=False)
    (error,) = flatten_errors(raised.value)
    assert isinstance(error, ConfigError)
    return str(error)


async def test_rpc_port_alone_serves_grpc_only() -> None:
    async with _serving(_prepared(rpc_port=0)) as running:
        answer = await _call(running.grpc[0], name="uci")
        assert running.rest == []
    assert list(answer.value) == ["array([[4.]], dtype=float32)"]


async def test_http_port_alone_serves_grpc_on_the_next_free_port() -> None:
    (port,) = free_ports(1)
    async with _serving(_prepared(http_port=port)) as running, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/uci/prediction", json={"key": ["x"], "value": [2]})
        assert int(running.grpc[0].rpartition(":")[2]) > port
        assert (await _call(running.grpc[0])).err_no == 0
    assert answer.json()["value"] == ["array([[4.]], dtype=float32)"]


async def test_ports_of_the_options_replace_those_of_the_file() -> None:
    rpc, http = free_ports(2)
    async with _serving(_prepared(rpc_port=9998, http_port=18082), port=rpc, rest_port=http) as running:
        assert (running.grpc, running.rest) == ([f"127.0.0.1:{rpc}"], [f"127.0.0.1:{http}"])
        assert [entry.port for entry in list_processes()] == [[rpc, http]]
    assert list_processes() == []


async def test_service_is_not_served_with_invalid_settings(tmp_path: Path) -> None:
    nowhere = {"double": {"local_service_conf": {"model_config": "nowhere"}}}
    message = "op.double.local_service_conf.model_config: no such file or folder"
    assert f"yml_dict: {message}" in await _refusal(_prepared(rpc_port=0, op=nowhere))
    file = tmp_path / "own.yml"
    file.write_text(f"rpc_port: 0\nop: {nowhere}\n")
    service = _Service(name="uci")
    service.prepare_pipeline_config(str(file))
    assert f"{file}:2: {message}" in await _refusal(service)
    service.prepare_pipeline_config(str(tmp_path / "nope.yml"))
    assert "nope.yml" in await _refusal(service)
    assert "prepare_pipeline_config" in await _refusal(_Service())


def test_script_of_a_service_that_cannot_start_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.workers.run_service.configure_logs", lambda: None)
    with pytest.raises(SystemExit) as ended:
        run_script_service(_prepared(worker_num=1))
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: yml_dict: rpc_port and http_port are both missing")


async def test_service_without_a_name() -> None:
    async with (
        _serving(_prepared(_Service(name=""), rpc_port=0, http_port=0)) as running,
        httpx.AsyncClient(base_url=f"http://{running.rest[0]}", trust_env=False) as client,
    ):
        assert (await _call(running.grpc[0])).err_no == 0
        assert (await client.post("/uci/prediction", json={})).json()["err_no"] == 3002
        assert (await client.get("/v2/models/pipeline")).status_code == 200
        assert (await client.get("/trace")).json()["codes"] == {"0": 1}


async def test_unusable_folder_of_process_info_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SERVING_HOME", str(tmp_path / "file" / "folder"))
    with pytest.raises(ExceptionGroup) as raised:
        await serve_plan(_plan_of(_prepared(rpc_port=0)), handle_signals=False)
    assert raised.value.subgroup(OSError) is not None


class _Waiting(Op):
    """Op that waits at a gate if the text of the request is ``gate``."""

    gate: ClassVar[trio.Event]
    arrived: ClassVar[trio.Event]

    async def preprocess(self, input_dicts: Any, data_id: int = 0, log_id: int = 0) -> Any:
        ((_, given),) = input_dicts.items()
        if given["x"] == "gate":
            self.arrived.set()
            await self.gate.wait()
        return {"y": given["x"]}, False, None, ""


class _WaitingService(WebService):
    def get_pipeline_response(self, read_op: Op) -> Op:
        _Waiting.gate, _Waiting.arrived = trio.Event(), trio.Event()
        return _Waiting(name="wait", input_ops=[read_op])


async def _post(running: ServedPlan, x: str, answers: dict[str, Any]) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client:
        answer = await client.post(f"http://{running.rest[0]}/uci/prediction", json={"key": ["x"], "value": [x]})
    answers[x] = answer.json()


async def test_drain_finishes_running_requests_and_refuses_queued_ones() -> None:
    answers: dict[str, Any] = {}
    service = _prepared(_WaitingService(name="uci"), rpc_port=0, http_port=0, worker_num=1)
    async with trio.open_nursery() as nursery, _serving(service) as running:
        nursery.start_soon(_post, running, "gate", answers)
        await _Waiting.arrived.wait()
        nursery.start_soon(_post, running, "queued", answers)
        await trio.testing.wait_all_tasks_blocked(0.1)
        running.drain()
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (answers["queued"]["err_no"], answers["queued"]["err_msg"]) == (3001, "dag closed.")
        assert "gate" not in answers
        _Waiting.gate.set()
    assert answers["gate"]["value"] == ["gate"]


async def test_disconnected_client_frees_its_place() -> None:
    answers: dict[str, Any] = {}
    service = _prepared(_WaitingService(name="uci"), rpc_port=0, http_port=0, worker_num=1)
    async with _serving(service) as running:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_post, running, "gate", answers)
            await _Waiting.arrived.wait()
            nursery.cancel_scope.cancel()
        await _post(running, "next", answers)
    assert answers["next"]["value"] == ["next"]


class _Lingering(OpPipelineKind):
    """A pipeline that ends once its event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.executor = EchoExecutor()
        self.ending, self.go = trio.Event(), trio.Event()

    async def load(self, spec: OpPipelineSpec, version: int, directory: Path, context: LoadContext) -> OpService:
        del version, directory
        return await host_service(context.tasks, self._opened(spec, context), kind=self.name, name=spec.name)

    @asynccontextmanager
    async def _opened(self, spec: OpPipelineSpec, context: LoadContext) -> AsyncIterator[OpService]:
        del context
        try:
            yield OpService(spec.name, self.executor, None, PipelineSettings())
        finally:
            with trio.CancelScope(shield=True):
                self.ending.set()
                await self.go.wait()


async def test_signal_after_the_drain_changes_nothing() -> None:
    kind, until = _Lingering(), trio.Event()
    plan = replace(executor_plan(kind.executor), kinds={**KINDS, OpPipelineKind.name: kind})
    results: list[bool] = []

    async def serve(*, task_status: trio.TaskStatus[Running]) -> None:
        results.append(await serve_plan(plan, WorkerProcessContext(wait_drain=until.wait), task_status=task_status))

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


class _Refusing(_Lingering):
    def __init__(self) -> None:
        super().__init__()
        self.go.set()
        self.drained: list[str] = []

    def begin_drain(self, service: Any) -> None:
        self.drained.append(service.name)
        super().begin_drain(service)


@pytest.mark.parametrize("is_restart", [True, False])
async def test_queued_calls_are_refused_unless_only_a_worker_restarts(is_restart: bool) -> None:
    kind, until = _Refusing(), trio.Event()
    plan = replace(executor_plan(kind.executor), kinds={**KINDS, OpPipelineKind.name: kind})
    hosting = WorkerProcessContext(wait_drain=until.wait, is_restart=lambda: is_restart)
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_plan, plan, hosting, handle_signals=False))
        until.set()
    assert bool(kind.drained) is not is_restart
