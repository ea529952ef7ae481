from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ovmstrio.config.specs import OpPipelineSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.service import Servable
from ovmstrio.ext.ops import WebService
from ovmstrio.ops.config_file import CONFIG_VARIABLE, validate_pipeline_config
from ovmstrio.ops.graph import set_service_runner
from ovmstrio.ops.kind import OpPipelineKind
from ovmstrio.ops.messages import PipelineRequest
from ovmstrio.ops.op_service import OpService
from ovmstrio.ops.predictor.factory import PredictorFactory
from ovmstrio.ops.predictor.local_model import LocalPredictor
from ovmstrio.ops.prepared_service import PreparedService
from ovmstrio.ops.settings import LocalServiceConf, OpSettings
from ovmstrio.ops.validate import validate_pipeline
from ovmstrio.serving.kind import CallType, LoadContext
from tests.support.ops import text_graph
from tests.support.paddle_files import layers, write_described
from tests.support.servables import trying, verdicts

SCRIPT = """
import logging
import os
import sys

import dictionary
from ovmstrio.ext.ops import Op, WebService

SEEN = [__name__, sys.modules["__main__"].__dict__ is globals(), sys.argv, os.environ.get("OVMS_PIPELINE_CONFIG")]


class Look(Op):
    def preprocess(self, input_dicts, data_id=0, log_id=0):
        (given,) = input_dicts.values()
        logging.getLogger("own").warning("looking in %s", dictionary.NAME)
        import late
        return {"found": dictionary.NAME + given["x"] + late.SUFFIX, "seen": repr(SEEN)}


class Service(WebService):
    def get_pipeline_response(self, read_op):
        return Look(name="look", input_ops=[read_op])


if __name__ == "__main__":
    service = Service(name="words")
    service.prepare_pipeline_config("config.yml")
    service.run_service()
    raise SystemExit(3)
"""


def project(folder: Path, name: str, config: str = "worker_num: 2\n") -> OpPipelineSpec:
    folder.mkdir(exist_ok=True)
    (folder / "config.yml").write_text(config)
    (folder / "dictionary.py").write_text(f"NAME = {name!r}\n")
    (folder / "late.py").write_text(f"SUFFIX = {'-' + name!r}\n")
    (folder / "web_service.py").write_text(SCRIPT)
    return OpPipelineSpec(
        name=name, base_path=folder, config=folder / "config.yml", script=folder / "web_service.py"
    )  # fmt: skip


@asynccontextmanager
async def loading(kind: OpPipelineKind | None = None) -> AsyncIterator[Any]:
    """Yield a function that loads specs; the services are closed with the block at the latest."""
    kind = kind or OpPipelineKind()

    async def no_lease(name: str, version: str = "") -> Any:
        raise AssertionError(name, version)

    async with trio.open_nursery() as tasks:
        context = LoadContext(lease=no_lease, tasks=tasks)

        async def load(spec: OpPipelineSpec) -> OpService:
            return await kind.load(spec, 1, spec.base_path, context)

        yield load
        tasks.cancel_scope.cancel()


async def infer(service: OpService, text: str = "?", name: str = "") -> dict[str, str]:
    response = await service.answer(PipelineRequest(keys=["x"], values=[text], name=name), trio.current_time() + 20)
    assert response.err_no == 0, response.err_msg
    return dict(zip(response.keys, response.values, strict=True))


async def test_services_have_their_own_modules_and_log_files(tmp_path: Path) -> None:
    runner: list[WebService] = []
    set_service_runner(runner.append)
    before = sys.argv, sys.modules["__main__"], os.environ.get(CONFIG_VARIABLE), Path.cwd(), list(sys.path)
    async with loading() as load:
        one, two = [await load(project(tmp_path / name, name)) for name in ("one", "two")]
        for service in (one, two, one):
            found = await infer(service, name=service.name)
            assert found["found"] == f"{service.name}?-{service.name}"
            folder = tmp_path / service.name
            seen = ["__main__", True, [str(folder / "web_service.py")], str(folder / "config.yml")]
            assert found["seen"] == repr(seen)
        assert (sys.argv, sys.modules["__main__"], os.environ.get(CONFIG_VARIABLE), Path.cwd(), sys.path) == before
        assert set_service_runner(None) == runner.append
        await one.aclose()
        assert (await infer(two))["found"] == "two?-two"
        await two.aclose()
    for name, count in (("one", 2), ("two", 2)):
        text = (tmp_path / name / "PipelineServingLogs" / "pipeline.log").read_text()
        assert text.count(f"looking in {name}") == count
        assert text.count("looking in") == count


async def test_a_service_takes_tensors_and_drains_requests(tmp_path: Path) -> None:
    kind = OpPipelineKind()
    async with loading(kind) as load:
        service: OpService = await load(project(tmp_path, "words"))
        assert isinstance(service, Servable)
        assert kind.call_types == {CallType.TENSORS, CallType.HTTP}
        assert (service.unready_reason(), kind.unready_reason(service)) == ("", "")
        given = InferInput("x", "BYTES", (1,))
        response = await service.infer(InferRequest("words", inputs=[given], raw_inputs=[b"\1\0\0\0?"]))
        assert [each.name for each in response.outputs] == ["found", "seen"]
        kind.begin_drain(service)
        refused = await service.answer(PipelineRequest(), trio.current_time() + 20)
        assert refused.err_no == 3001
        assert kind.unready_reason(service) == "the pipeline is closed"
        await service.aclose()


async def test_changed_files_are_noticed(tmp_path: Path) -> None:
    kind, spec = OpPipelineKind(), project(tmp_path, "words")
    marks = [kind.fingerprint(spec, tmp_path)]
    async with loading(kind) as load:
        service = await load(spec)
        await infer(service)
        assert kind.fingerprint(spec, tmp_path) == marks[0]
        for file in ("config.yml", "web_service.py", "dictionary.py"):
            (tmp_path / file).write_text((tmp_path / file).read_text() + "\n# changed\n")
            marks.append(kind.fingerprint(spec, tmp_path))
        assert len(set(marks)) == len(marks)
        (tmp_path / "dictionary.py").write_text("NAME = 'new'\n")
        newer = await load(spec)
        assert (await infer(newer))["found"].startswith("new")
        assert (await infer(service))["found"].startswith("words")
        (tmp_path / "dictionary.py").write_text("raise LookupError('no dictionary')\n")
        with pytest.raises(ConfigError, match=r"web_service.py:6: the script raised LookupError: no dictionary"):
            await load(spec)
        assert (await infer(newer))["found"].startswith("new")
    assert list(kind.list_versions(spec).versions) == [1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("web_service.py", "service.run_service()", "pass"), "web_service.py:29: the script raised SystemExit"),
        (("web_service.py", "raise SystemExit(3)", "Service(name='b').run_service()"), "none of which is 'mine'"),
        (("web_service.py", "class Look", "class class"), "web_service.py:12: the script raised SyntaxError"),
        (("config.yml", "worker_num: 2", "worker_num: none"), "config.yml:1: "),
        (
            ("config.yml", "worker_num: 2", "worker_num: 2\nop: {look: {local_service_conf: {model_config: nope}}}"),
            "config.yml:2: op.look.local_service_conf.model_config: no such file or folder",
        ),
    ],
    ids=["no service", "several", "syntax", "value", "model"],
)
async def test_services_that_cannot_be_loaded(tmp_path: Path, change: tuple[str, str, str], text: str) -> None:
    spec = project(tmp_path, "mine")
    file, old, new = change
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
    async with loading() as load:
        with pytest.raises(ConfigError, match=text.replace(".", r"\.")):
            await load(spec)
    assert not [name for name in sys.modules if name.endswith(".dictionary")]


async def test_ports_have_no_effect_among_other_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with loading() as load:
        await load(project(tmp_path, "words", "rpc_port: 9998\nhttp_port: 18082\nlogging: {enabled: false}\n"))
    assert "ports of a service on a shared server ignored" in capsys.readouterr().out


async def test_a_spec_without_a_script_needs_a_prepared_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    (tmp_path / "dictionary.py").write_text("NAME = 'here'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(compile(SCRIPT.split("if __name__", maxsplit=1)[0], "<script>", "exec"), scope)
    service: WebService = scope["Service"](name="words")
    service.prepare_pipeline_config(yml_dict={"rpc_port": 0, "logging": {"enabled": False}})
    spec = OpPipelineSpec(name="words", base_path=tmp_path)
    async with loading(OpPipelineKind({"words": PreparedService(service)})) as load:
        assert (await load(spec)).metadata.name == "words"
        with pytest.raises(ConfigError, match="has no script"):
            await load(spec.model_copy(update={"name": "other"}))
    sys.modules.pop("dictionary", None)


async def test_worker_processes_run_the_script_again(tmp_path: Path) -> None:
    async with loading() as load:
        service = await load(project(tmp_path, "words", "dag: {is_thread_op: false}\n"))
        assert (await infer(service))["found"] == "words?-words"
        await service.aclose()
    assert "looking in words" in (tmp_path / "PipelineServingLogs" / "pipeline.log").read_text()


# Models of Ops


async def test_models_of_ops_and_of_scripts_are_tried_once_before_their_load(tmp_path: Path) -> None:
    folder = write_described(tmp_path / "model", *layers())
    settings = OpSettings("op", concurrency=2, local_service_conf=LocalServiceConf(str(folder)))
    async with trying(tmp_path / "trials") as probe:
        await PredictorFactory(is_thread_op=True, probe=probe)(settings, 0)
        assert len(verdicts(tmp_path / "trials")) == 1
        predictor = LocalPredictor()
        await trio.to_thread.run_sync(predictor.load_model_config, str(folder), False, 0, False, 3)
        assert len(verdicts(tmp_path / "trials")) == 2


async def test_models_that_cannot_be_loaded_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    ops = "  a: {local_service_conf: {model_config: nowhere}}\n  b: {server_endpoints: ['h:1'], client_type: brpc}\n"
    file.write_text(f"rpc_port: 0\nop:\n{ops}")
    problems = await validate_pipeline(text_graph("a<@", "b<a"), validate_pipeline_config(file), load=True)
    found = [(problem.line, problem.path) for problem in problems]
    assert found == [(3, "op.a.local_service_conf.model_config"), (4, "op.b.client_type")]
