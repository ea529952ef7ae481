from __future__ import annotations

import contextlib
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from ovmstrio.config.specs import ModelSpec, ServerSpec
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.util.container_limits import usable_cores
from ovmstrio.workers.auto_workers import MeasurementSettings, choose_workers
from tests.support import ir
from tests.support.processes import serving
from tests.support.system_servers import write_config
from tests.support.waits import WAIT_SECONDS, until


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovmstrio.workers.auto_workers.usable_cores", lambda: 2)


async def test_measured_calls_of_trivial_models_need_more_workers_than_those_of_long_models(
    tmp_path: Path,
) -> None:
    models = {"trivial": ir.dummy(), "long": ir.slow(256, 60), "texts": ir.string_passthrough()}
    for name, model in models.items():
        ir.save(model, tmp_path, name)
    for names, count in ((("trivial", "long", "texts"), 2), (("long", "texts"), 1)):
        file = write_config(tmp_path, *({"name": name, "base_path": name} for name in names))
        plan = await choose_workers(await read_plan(ServerSettings(config_path=file, workers=0)))
        assert (plan.processes, repr(names[0]) in plan.workers_reason) == (count, True)
    assert (
        "mostly OpenVINO compute" in (await choose_workers(plan, MeasurementSettings(max_model_bytes=1))).workers_reason
    )


@pytest.mark.parametrize(
    ("measuring", "reason"),
    [
        (MeasurementSettings(timeout_seconds=0.01), "models not loaded within 0.01 s"),
        (MeasurementSettings(program="ovmstrio.no_such_program"), ""),
    ],
    ids=["timeout", "error"],
)
async def test_failed_measurement_chooses_one_worker(
    tmp_path: Path, measuring: MeasurementSettings, reason: str
) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    plan = await read_plan(ServerSettings(model_name="m", model_path=tmp_path / "m", workers=0))
    with capture_logs() as lines:
        assert (await choose_workers(plan, measuring)).processes == 1
    (line,) = [line for line in lines if line["event"] == "calls not measured"]
    assert reason in line["reason"]


async def test_unreadable_models_and_configuration_choose_one_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.xml").write_text("<none/>")
    file = write_config(tmp_path, {"name": "broken", "base_path": "broken"})
    plan = await read_plan(ServerSettings(config_path=file, workers=0, crash_probe="off"))
    no_path = ModelSpec(name="no_path", base_path=tmp_path / ("x" * 300))
    plan = replace(plan, spec=ServerSpec(services=(*plan.spec.services, no_path)))
    with capture_logs() as lines:
        assert (await choose_workers(plan)).processes == 1
        file.unlink()
        assert (await choose_workers(plan)).processes == 1
    (line,) = [line for line in lines if line["event"] == "calls not measured"]
    assert "the file cannot be read" in line["reason"]
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.skipif(usable_cores() == 1, reason="nothing is measured on one core")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_measuring_process_ends_with_the_server(tmp_path: Path, number: signal.Signals, code: int) -> None:
    config = write_config(tmp_path, {"name": "m", "base_path": str(ir.save(ir.slow(1024, 2_000), tmp_path, "m"))})
    options = ("--config_path", str(config), "--workers", "auto")
    with serving(*options, ready=False, log=tmp_path / "log") as server:
        # It has imported everything, and loads or computes from now on. A process that it has forked has the same
        # command line until it executes a program, comes later in the list, and may end at any time.
        measuring, *_ = until(lambda: [each for each in server.descendants("measuring") if _has_openvino(each)])
        status, printed = server.stop(number)
        assert (status, "Traceback" in printed) == (code, False)
        measuring.wait(WAIT_SECONDS)


def _has_openvino(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("openvino" in each.path for each in process.memory_maps())
    return False
