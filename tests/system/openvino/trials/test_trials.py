"""Models that crash OpenVINO, and a process that goes on."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
import trio
from structlog.testing import capture_logs

from ovmstrio.config.specs import ShapeSpec
from ovmstrio.core.errors import NotReady
from ovmstrio.openvino.trials import pool, trial_workers
from ovmstrio.runtimes.models.load_model import load_model
from ovmstrio.work.processes import WorkerProcess
from tests.support import ir
from tests.support.servables import raw_request
from tests.support.trials import load_saved, refusal_of, saved, trying, verdicts

TODAY = datetime.now(UTC).date().isoformat()
NO_PROGRAM = "ovmstrio.no_program"


def _let_no_process_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_workers, "WorkerProcess", lambda _: WorkerProcess(NO_PROGRAM))


@pytest.mark.parametrize(
    ("model", "crashes", "layer"),
    # Where memory is spoiled, it depends on what else is in it how that is found.
    [
        (ir.steps(bad=1), ["SIGFPE"], "counting (Range)"),
        (ir.first_string(), ["SIGABRT", "SIGSEGV"], "cutting (Slice)"),
    ],
)
async def test_a_model_that_crashes_is_refused_with_the_signal_and_the_layer(
    tmp_path: Path, model: ov.Model, crashes: list[str], layer: str
) -> None:
    """It runs in another process only, and others are loaded as if nothing were."""
    bad, good = saved(model, tmp_path, "bad"), saved(ir.dummy(), tmp_path, "good")
    async with trying(tmp_path / "trials"):
        problem = await refusal_of(bad)
        assert await load_saved(good) == []
    crash = next(each for each in crashes if each in problem.message)
    assert problem.message == (
        f"OpenVINO crashes with {crash} when it runs the model, in its layer {layer}, as a trial in a process of its "
        "own has shown"
    )
    assert problem.file == str(tmp_path / "bad/1/model.xml")
    noted = {"crash": crash, "layer": layer, "zeros_crash": "", "zeros_layer": "", "day": TODAY}
    assert noted in verdicts(tmp_path / "trials")


async def test_what_was_tried_is_known_to_later_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start no process: what ran is loaded, what crashed is refused, with the way to have it tried again."""
    bad, good = saved(ir.steps(bad=1), tmp_path, "bad"), saved(ir.dummy(), tmp_path, "good")
    async with trying(tmp_path / "trials", layer_seconds=0):
        await refusal_of(bad)
        await load_saved(good)
    _let_no_process_start(monkeypatch)
    async with trying(tmp_path / "trials", layer_seconds=0):
        await load_saved(good)
        problem = await refusal_of(bad)
        assert f"has shown on {TODAY}; it is not tried again as long as files, settings and OpenVINO" in problem.message
        assert "or start with --trial_load again" in problem.suggestion
        (file,) = (file for file in (tmp_path / "trials/verdicts").iterdir() if str(file) in problem.suggestion)
        file.unlink()
        with pytest.raises(NotReady, match="models cannot be tried"):
            await load_saved(bad)


async def test_what_crashed_is_tried_again_once_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran is not."""
    bad, good = saved(ir.steps(bad=1), tmp_path, "bad"), saved(ir.dummy(), tmp_path, "good")
    async with trying(tmp_path / "trials", layer_seconds=0):
        await refusal_of(bad)
        await load_saved(good)
    async with trying(tmp_path / "trials", "again", layer_seconds=0):
        assert "has shown on" not in (await refusal_of(bad)).message
        assert "has shown on" in (await refusal_of(bad)).message
        _let_no_process_start(monkeypatch)
        await load_saved(good)


async def test_a_model_that_crashes_on_zeros_alone_is_served_with_a_warning(tmp_path: Path) -> None:
    """Real inputs are none of that kind; the warning is given by later servers, too."""
    spec = saved(ir.steps(), tmp_path)
    for _ in range(2):
        with capture_logs() as logs:
            async with trying(tmp_path / "trials"):
                (remark,) = await load_saved(spec)
        assert remark.severity == "warning"
        assert remark.message == (
            "OpenVINO crashes with SIGFPE when all inputs of the model are zeros, in its layer counting (Range)"
        )
        assert [line["model"] for line in logs if line["event"] == "model crashes on zeros"] == ["model"]


async def test_other_settings_and_other_files_are_tried_anew_and_copies_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name or a place makes no difference."""
    async with trying(tmp_path / "trials"):
        first = saved(ir.dummy(), tmp_path, "first")
        await load_saved(first)
        monkeypatch.setattr(trial_workers.TrialWorkers, "lend", _lend_nothing)
        copy = Path(shutil.copytree(tmp_path / "first", tmp_path / "copy"))
        await load_saved(first.model_copy(update={"name": "copy", "base_path": copy, "nireq": 3}))
        for model, settings in ((ir.dummy(), {"target_device": "AUTO"}), (ir.dummy((2, 3)), {})):
            with pytest.raises(NotReady, match="no process"):
                await load_saved(saved(model, tmp_path, "other", **settings))


def _lend_nothing(*_: object) -> None:
    raise NotReady("no process")


async def _refuse(*_: object) -> None:
    raise NotReady("tried")


async def test_a_model_that_two_load_at_once_is_tried_once(tmp_path: Path) -> None:
    """The second one waits for the verdict."""
    spec = saved(ir.dummy(), tmp_path)
    with capture_logs() as logs:
        async with trying(tmp_path / "trials"), trio.open_nursery() as nursery:
            nursery.start_soon(load_saved, spec)
            nursery.start_soon(load_saved, spec)
    assert len([line for line in logs if line["event"].startswith("trying a model")]) == 1


async def test_models_that_cannot_be_compiled_are_refused_as_without_a_trial(tmp_path: Path) -> None:
    """With the same words, and nothing is remembered."""
    spec = saved(ir.dummy(), tmp_path, target_device="NONE")
    alone = await refusal_of(spec)
    async with trying(tmp_path / "trials"):
        assert await refusal_of(spec) == alone
    assert verdicts(tmp_path / "trials") == []


async def test_a_process_that_others_end_says_nothing_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again with the next load."""
    monkeypatch.setattr(trial_workers, "signal_name", lambda _: "SIGKILL")
    async with trying(tmp_path / "trials"):
        with pytest.raises(NotReady, match=r"'model' could not be tried: the worker process was killed by SIGFPE"):
            await load_saved(saved(ir.steps(bad=1), tmp_path))
    assert verdicts(tmp_path / "trials") == []


async def test_a_folder_that_cannot_be_written_makes_trials_last_as_long_as_the_server(tmp_path: Path) -> None:
    """It is told once."""
    (tmp_path / "trials").touch()
    spec = saved(ir.dummy(), tmp_path)
    with capture_logs() as logs:
        async with trying(tmp_path / "trials"):
            await load_saved(spec)
            await load_saved(spec)
    events = [line["event"] for line in logs]
    assert events.count("trials of models are remembered by this process only") == 1
    assert events.count("trying a model that was never seen to run here") == 1


async def test_no_model_is_tried_where_that_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows the models may save the second that it takes."""
    _let_no_process_start(monkeypatch)
    async with trying(tmp_path / "trials", "off"):
        await load_saved(saved(ir.dummy(), tmp_path))


async def test_shapes_that_requests_bring_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request would wait for a process to start."""
    spec = saved(ir.dummy((1, 10)), tmp_path, shapes={"b": ShapeSpec(auto=True)})
    async with trying(tmp_path / "trials"):
        servable = await load_model(spec, 1, spec.base_path / "1")
        before = len(verdicts(tmp_path / "trials"))
        monkeypatch.setattr(pool.TrialPool, "try_model", _refuse)
        response = await servable.infer(raw_request({"b": np.ones((1, 7), np.float32)}))
        assert response.outputs[0].shape == (1, 7)
        assert len(verdicts(tmp_path / "trials")) == before == 1
        await servable.aclose()
