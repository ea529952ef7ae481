from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.config.specs import BatchingSpec, LayoutSpec, ModelSpec, ShapeSpec
from ovmstrio.config.tensor_mapping import read_mapping
from ovmstrio.core.errors import NotReady
from ovmstrio.core.tensor import Dim
from ovmstrio.inference import crash_probe as trial_workers
from ovmstrio.inference.compile import ModelFile
from ovmstrio.inference.crash_probe import probe_model_of
from ovmstrio.inference.crash_probe_program import compile_from_plain_data
from ovmstrio.isolation.worker_process import WorkerProcess
from ovmstrio.models.loading import load_model
from tests.support import ir
from tests.support.servables import load_saved, raw_request, refusal_of, saved, trying, verdicts
from tests.support.waits import WAIT_SECONDS


def _today_or_yesterday() -> list[str]:
    """Return both days that a verdict of this test may have: midnight may pass meanwhile."""
    now = datetime.now(UTC)
    return [(now - timedelta(days=days)).date().isoformat() for days in range(2)]


def _refuse(*_: object, **__: object) -> None:
    raise NotReady("no process")


@pytest.mark.parametrize(
    ("model", "crashes", "layer"),
    # The signal of corrupted memory depends on the content of the memory.
    [(ir.steps(bad=1), ["SIGFPE"], "counting (Range)"), (ir.first_string(), ["SIGABRT", "SIGSEGV"], "cutting (Slice)")],
)
async def test_crashing_model_is_refused_with_the_signal_and_the_layer(
    tmp_path: Path, model: ov.Model, crashes: list[str], layer: str
) -> None:
    bad, good = saved(model, tmp_path, "bad"), saved(ir.dummy(), tmp_path, "good")
    async with trying(tmp_path / "trials"):
        problem = await refusal_of(bad)
        assert await load_saved(good) == []
    crash = next(each for each in crashes if each in problem.message)
    assert problem.message == (f"OpenVINO crashes with {crash} when it runs the model in layer {layer}")
    assert problem.file == str(tmp_path / "bad/1/model.xml")
    noted = {"crash": crash, "layer": layer, "zeros_crash": "", "zeros_layer": ""}
    assert any({**noted, "day": day} in verdicts(tmp_path / "trials") for day in _today_or_yesterday())


async def test_later_servers_know_the_verdicts_without_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = saved(ir.steps(bad=1), tmp_path, "bad"), saved(ir.dummy(), tmp_path, "good")
    async with trying(tmp_path / "trials", layer_seconds=0):
        await refusal_of(bad)
        await load_saved(good)
    # A model that crashed is tried again once on request; one that ran is not.
    async with trying(tmp_path / "trials", "retry", layer_seconds=0):
        assert "(crash probe of" not in (await refusal_of(bad)).message
        assert "(crash probe of" in (await refusal_of(bad)).message
    monkeypatch.setattr(trial_workers, "WorkerProcess", lambda _: WorkerProcess("ovmstrio.no_program"))
    async with trying(tmp_path / "trials", "retry", layer_seconds=0):
        await load_saved(good)
    async with trying(tmp_path / "trials", layer_seconds=0):
        await load_saved(good)
        problem = await refusal_of(bad)
        (day,) = re.findall("crash probe of (.*?); not repeated while", problem.message)
        assert day in _today_or_yesterday()
        assert "or start with --crash-probe retry" in problem.suggestion
        (file,) = (file for file in (tmp_path / "trials/verdicts").iterdir() if str(file) in problem.suggestion)
        file.unlink()
        with pytest.raises(NotReady, match="crash probe worker not started"):
            await load_saved(bad)
    async with trying(tmp_path / "trials", "off"):
        await load_saved(saved(ir.dummy((1, 3)), tmp_path, "new"))


async def test_model_that_crashes_only_on_zeros_is_served_with_a_warning(tmp_path: Path) -> None:
    spec = saved(ir.steps(), tmp_path)
    for _ in range(2):
        with capture_logs() as logs:
            async with trying(tmp_path / "trials"):
                (remark,) = await load_saved(spec)
        assert remark.severity == "warning"
        assert remark.message == (
            "OpenVINO crashes with SIGFPE when all inputs of the model are zeros in layer counting (Range)"
        )
        assert [line["model"] for line in logs if line["event"] == "model crashes on zeros"] == ["model"]


async def test_other_settings_and_files_are_tried_again_and_copies_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trying(tmp_path / "trials"):
        first = saved(ir.dummy(), tmp_path, "first")
        await load_saved(first)
        monkeypatch.setattr(trial_workers.ProbeWorkerPool, "lend", _refuse)
        copy = Path(shutil.copytree(tmp_path / "first", tmp_path / "copy"))
        await load_saved(first.model_copy(update={"name": "copy", "base_path": copy, "nireq": 3}))
        for model, settings in ((ir.dummy(), {"target_device": "AUTO"}), (ir.dummy((2, 3)), {})):
            with pytest.raises(NotReady, match="no process"):
                await load_saved(saved(model, tmp_path, "other", **settings))


async def test_model_loaded_twice_at_once_is_tried_once(tmp_path: Path) -> None:
    spec = saved(ir.dummy(), tmp_path)
    with capture_logs() as logs:
        async with trying(tmp_path / "trials"), trio.open_nursery() as nursery:
            nursery.start_soon(load_saved, spec)
            nursery.start_soon(load_saved, spec)
    assert len([line for line in logs if line["event"].startswith("crash probe started")]) == 1


async def test_models_that_cannot_be_compiled_are_refused_as_without_a_trial(tmp_path: Path) -> None:
    spec = saved(ir.dummy(), tmp_path, target_device="NONE")
    alone = await refusal_of(spec)
    async with trying(tmp_path / "trials"):
        assert await refusal_of(spec) == alone
    assert verdicts(tmp_path / "trials") == []


async def test_killed_trial_process_says_nothing_about_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_workers, "signal_name", lambda _: "SIGKILL")
    async with trying(tmp_path / "trials"):
        with pytest.raises(NotReady, match=r"'model' failed: the worker process was killed by SIGFPE"):
            await load_saved(saved(ir.steps(bad=1), tmp_path))
    assert verdicts(tmp_path / "trials") == []


async def test_verdicts_stay_in_memory_if_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "trials").touch()
    spec = saved(ir.dummy(), tmp_path)
    with capture_logs() as logs:
        async with trying(tmp_path / "trials"):
            await load_saved(spec)
            await load_saved(spec)
    events = [line["event"] for line in logs]
    assert events.count("crash probe verdicts not stored") == 1
    assert events.count("crash probe started") == 1


async def test_shapes_of_requests_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = saved(ir.dummy((1, 10)), tmp_path, shapes={"b": ShapeSpec(auto=True)})
    async with trying(tmp_path / "trials") as probe:
        servable = await load_model(spec, 1, spec.base_path / "1", probe=probe)
        before = len(verdicts(tmp_path / "trials"))
        monkeypatch.setattr(trial_workers.CrashProbe, "try_model", _refuse)
        response = await servable.infer(raw_request({"b": np.ones((1, 7), np.float32)}))
        assert response.outputs[0].shape == (1, 7)
        assert len(verdicts(tmp_path / "trials")) == before == 1
        await servable.aclose()


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    started: list[WorkerProcess] = []

    def start(*args: Any, **settings: Any) -> WorkerProcess:
        started.append(WorkerProcess(*args, **settings))
        return started[-1]

    monkeypatch.setattr(trial_workers, "WorkerProcess", start)
    return started


async def test_one_process_tries_models_in_turn_and_is_replaced_when_it_ends(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    async with trying(tmp_path / "trials"):
        for size in (1, 2, 3):
            await load_saved(saved(ir.dummy((1, size)), tmp_path, f"m{size}"))
        assert len(workers) == 1
        assert not workers[0].ended.is_set()
        workers[0].kill()
        await load_saved(saved(ir.dummy((1, 4)), tmp_path, "m4"))
    assert len(verdicts(tmp_path / "trials")) == 4
    assert len(workers) == 2
    assert workers[1].ended.is_set()


@pytest.mark.parametrize(("waited_starts", "processes"), [(0.0, 2), (1e9, 1)])
async def test_models_loaded_at_once_are_tried_by_one_process_per_core_if_they_are_slower_than_a_start(
    tmp_path: Path,
    workers: list[WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
    waited_starts: float,
    processes: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(trial_workers, "_WAITED_STARTS", waited_starts)
    async with trying(tmp_path / "trials"), trio.open_nursery() as nursery:
        for size in (1, 2, 3, 4):
            nursery.start_soon(load_saved, saved(ir.dummy((1, size)), tmp_path, f"m{size}"))
    assert len(verdicts(tmp_path / "trials")) == 4
    assert len(workers) == processes


async def test_process_starts_before_the_first_model_if_no_verdict_is_stored(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    spec = saved(ir.dummy(), tmp_path)
    async with trying(tmp_path / "trials") as probe:
        assert probe is not None
        for _ in range(2):
            await probe.prepare()
        with trio.fail_after(WAIT_SECONDS):
            while not workers or workers[0].pid is None:
                await trio.lowlevel.checkpoint()
        await load_saved(spec)
    async with trying(tmp_path / "trials") as probe:
        assert probe is not None
        await probe.prepare()
        await load_saved(spec)
    assert len(workers) == 1


async def test_models_try_again_if_the_process_that_they_wait_for_cannot_be_started(
    tmp_path: Path, workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(trial_workers, "PROGRAM", "ovmstrio.no_program")
    refusals: list[NotReady] = []

    async def load(name: str) -> None:
        with pytest.raises(NotReady, match="crash probe worker not started") as caught:
            await load_saved(saved(ir.dummy(), tmp_path, name, target_device=f"MULTI:{name}"))
        refusals.append(caught.value)

    async with trying(tmp_path / "trials"), trio.open_nursery() as nursery:
        for name in ("CPU", "GPU"):
            nursery.start_soon(load, name)
    assert len(refusals) == len(workers) == 2


async def test_model_is_tried_again_if_an_earlier_one_damaged_the_process(
    tmp_path: Path, workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: str) -> WorkerProcess:
        workers.append(WorkerProcess("tests.support.crashing_worker"))
        return workers[-1]

    monkeypatch.setattr(trial_workers, "WorkerProcess", start)
    async with trying(tmp_path / "trials"):
        for size in (1, 2):
            await load_saved(saved(ir.dummy((1, size)), tmp_path, f"m{size}"))
    assert [verdict["crash"] for verdict in verdicts(tmp_path / "trials")] == ["", ""]
    assert len(workers) == 2


async def test_cancelled_load_kills_the_process(tmp_path: Path, workers: list[WorkerProcess]) -> None:
    spec = saved(ir.slow(1024, 200), tmp_path)
    async with trying(tmp_path / "trials"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load_saved, spec)
            with trio.fail_after(WAIT_SECONDS):
                while not workers or not workers[0].is_busy:
                    await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        with trio.fail_after(WAIT_SECONDS):
            await workers[0].ended.wait()
    assert verdicts(tmp_path / "trials") == []


async def test_idle_process_is_ended(tmp_path: Path, workers: list[WorkerProcess]) -> None:
    async with trying(tmp_path / "trials"):
        await load_saved(saved(ir.dummy(), tmp_path))
        with trio.fail_after(60):
            await workers[0].ended.wait()


def test_trial_compiles_with_the_settings_of_the_server(tmp_path: Path) -> None:
    base_path = ir.save(ir.image_passthrough(), tmp_path, "image")
    spec = ModelSpec(
        name="image",
        base_path=base_path,
        shapes={"photo": ShapeSpec(dims=(Dim(1, 4), Dim.fixed(8), Dim.fixed(8), Dim.fixed(3)))},
        layouts={"photo": LayoutSpec(tensor="NHWC")},
        mean=(1.0, 2.0, 3.0),
        scale=(2.0,),
        batching=BatchingSpec(max_batch_size=4, batch_timeout_ms=1),
    )
    (base_path / "1/mapping_config.json").write_text('{"inputs": {"image": "photo"}}')
    source = ModelFile(base_path / "1/model.xml", spec, read_mapping(base_path / "1"))
    compiled = compile_from_plain_data(probe_model_of(source, base_path / "1").argument)
    (photo,) = compiled.signature.inputs
    assert (photo.name, [dim.reported for dim in photo.shape][1:]) == ("photo", [8, 8, 3])
