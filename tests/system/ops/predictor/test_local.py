"""Trials of the models of Ops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf, OpSettings
from ovmstrio.runtimes.ops.predictor.local_predict import LocalPredictor
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from ovmstrio.runtimes.ops.predictor.protocol import Predictor
from tests.support.paddle_files import layers, write_described
from tests.support.servables import trying, verdicts


async def make(folder: Path, worker: int = 0, **conf: Any) -> Predictor:
    """Make what a worker of an Op infers with."""
    settings = OpSettings("op", concurrency=2, local_service_conf=LocalServiceConf(str(folder), **conf))
    return await PredictorMaker(is_thread_op=True)(settings, worker)


async def test_models_of_ops_and_of_predictors_in_threads_are_tried_first(tmp_path: Path) -> None:
    """Each once; what has been tried is known to whoever loads the same."""
    folder = write_described(tmp_path / "model", *layers())
    async with trying(tmp_path / "trials"):
        await make(folder)
        assert len(verdicts(tmp_path / "trials")) == 1
        predictor = LocalPredictor()
        await trio.to_thread.run_sync(predictor.load_model_config, str(folder), False, 0, False, 3)
        assert len(verdicts(tmp_path / "trials")) == 2
