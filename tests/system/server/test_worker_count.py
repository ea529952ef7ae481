"""Measurements that choose the number of workers."""

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


async def test_a_trivial_model_is_measured_to_be_the_loops_and_a_long_one_to_be_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, which has ended afterwards; a model of strings is not called, nor a large one loaded."""
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


async def test_measuring_that_takes_too_long_decides_for_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does one that fails; either is told."""
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


async def test_what_cannot_be_looked_at_is_told_by_who_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A path that is none, a model that is none, and a configuration that is gone keep no server from starting.

    What measures prints nothing of it, for the server's processes do.
    """
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
