from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec, ServerSpec
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.workers.choosing import Measuring, choose_workers
from tests.support import ir

PATIENCE_SECONDS = 120


async def test_measured_calls_of_trivial_models_need_more_workers_than_those_of_long_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.server.workers.choosing.usable_cores", lambda: 2)
    models = {"trivial": ir.dummy(), "long": ir.slow(256, 60), "texts": ir.string_passthrough()}
    for name, model in models.items():
        ir.save(model, tmp_path, name)
    for names, count in ((("trivial", "long", "texts"), 2), (("long", "texts"), 1)):
        entries = [{"config": {"name": name, "base_path": str(tmp_path / name)}} for name in names]
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"model_config_list": entries}), encoding="utf-8")
        with trio.fail_after(PATIENCE_SECONDS):
            plan = await choose_workers(await read_plan(ServerSettings(config_path=file, workers=0)))
        assert (plan.processes, repr(names[0]) in plan.workers_reason) == (count, True)
    assert "computing is most" in (await choose_workers(plan, Measuring(max_model_bytes=1))).workers_reason


async def test_failed_measurement_chooses_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ovmstrio.server.workers.choosing.usable_cores", lambda: 2)
    ir.save(ir.dummy(), tmp_path, "m")
    plan = await read_plan(ServerSettings(model_name="m", model_path=tmp_path / "m", workers=0))
    for measuring, reason in (
        (Measuring(timeout_seconds=0.01), "the models were not loaded in 0.01 s"),
        (Measuring(program="ovmstrio.no_such_program"), ""),
    ):
        with capture_logs() as lines, trio.fail_after(PATIENCE_SECONDS):
            assert (await choose_workers(plan, measuring)).processes == 1
        (line,) = [line for line in lines if line["event"] == "calls not measured"]
        assert reason in line["reason"]


async def test_unreadable_models_and_configuration_choose_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ovmstrio.server.workers.choosing.usable_cores", lambda: 2)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.xml").write_text("<none/>")
    entries = [{"config": {"name": "broken", "base_path": str(tmp_path / "broken")}}]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_config_list": entries}), encoding="utf-8")
    plan = await read_plan(ServerSettings(config_path=file, workers=0, trial_load="off"))
    no_path = ModelSpec(name="no_path", base_path=tmp_path / ("x" * 300))
    plan = replace(plan, spec=ServerSpec(services=(*plan.spec.services, no_path)))
    with capture_logs() as lines, trio.fail_after(2 * PATIENCE_SECONDS):
        assert (await choose_workers(plan)).processes == 1
        file.unlink()
        assert (await choose_workers(plan)).processes == 1
    (line,) = [line for line in lines if line["event"] == "calls not measured"]
    assert "the file cannot be read" in line["reason"]
    assert "".join(capfd.readouterr()) == ""
