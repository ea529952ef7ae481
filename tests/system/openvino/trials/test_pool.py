"""The processes in which models are tried: how many there are, and when they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.config.mapping import read_mapping
from ovmstrio.config.specs import BatchingSpec, LayoutSpec, ModelSpec, ShapeSpec
from ovmstrio.core.tensor import Dim
from ovmstrio.openvino.compile import ModelFile
from ovmstrio.openvino.trials import trial_workers
from ovmstrio.openvino.trials.model_trial import compile_plain, trial_of
from ovmstrio.work.processes import WorkerProcess
from tests.support import ir
from tests.support.trials import load_saved, saved, trying, verdicts
from tests.support.waits import WAIT_SECONDS


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """Give all worker processes that are started."""
    started: list[WorkerProcess] = []

    def start(*args: Any, **settings: Any) -> WorkerProcess:
        started.append(WorkerProcess(*args, **settings))
        return started[-1]

    monkeypatch.setattr(trial_workers, "WorkerProcess", start)
    return started


async def test_one_process_tries_one_model_after_the_other(tmp_path: Path, workers: list[WorkerProcess]) -> None:
    """It starts once, and ends with those who had it try."""
    async with trying(tmp_path / "trials"):
        for size in (1, 2, 3):
            await load_saved(saved(ir.dummy((1, size)), tmp_path, f"m{size}"))
        assert not workers[0].ended.is_set()
    assert len(verdicts(tmp_path / "trials")) == 3
    assert len(workers) == 1
    assert workers[0].ended.is_set()


async def test_models_that_are_loaded_at_once_are_tried_side_by_side(
    tmp_path: Path, workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are cores; others wait for one of the processes."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    async with trying(tmp_path / "trials"), trio.open_nursery() as nursery:
        for size in (1, 2, 3, 4):
            nursery.start_soon(load_saved, saved(ir.dummy((1, size)), tmp_path, f"m{size}"))
    assert len(verdicts(tmp_path / "trials")) == 4
    assert len(workers) == 2


async def test_a_process_that_ends_while_nobody_needs_it_is_replaced(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    """The next model is tried as if nothing were."""
    async with trying(tmp_path / "trials"):
        await load_saved(saved(ir.dummy((1, 1)), tmp_path, "first"))
        workers[0].kill()
        await load_saved(saved(ir.dummy((1, 2)), tmp_path, "second"))
    assert len(workers) == 2


async def test_a_model_is_not_blamed_for_what_an_earlier_one_did_to_the_process(
    tmp_path: Path, workers: list[WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again in a new one."""

    def start(_: str) -> WorkerProcess:
        workers.append(WorkerProcess("tests.support.spoiled_program"))
        return workers[-1]

    monkeypatch.setattr(trial_workers, "WorkerProcess", start)
    async with trying(tmp_path / "trials"):
        for size in (1, 2):
            await load_saved(saved(ir.dummy((1, size)), tmp_path, f"m{size}"))
    assert [verdict["crash"] for verdict in verdicts(tmp_path / "trials")] == ["", ""]
    assert len(workers) == 2


async def test_a_load_that_is_given_up_kills_the_process(tmp_path: Path, workers: list[WorkerProcess]) -> None:
    """Nothing is remembered."""
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


async def test_a_process_is_let_go_when_no_model_comes(tmp_path: Path, workers: list[WorkerProcess]) -> None:
    """It has much memory."""
    async with trying(tmp_path / "trials"):
        await load_saved(saved(ir.dummy(), tmp_path))
        with trio.fail_after(60):
            await workers[0].ended.wait()


def test_a_trial_compiles_with_the_settings_that_a_server_has(tmp_path: Path) -> None:
    """They go to the process as text."""
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
    compiled = compile_plain(trial_of(source, base_path / "1").argument)
    (photo,) = compiled.signature.inputs
    assert (photo.name, [dim.reported for dim in photo.shape][1:]) == ("photo", [8, 8, 3])
