from __future__ import annotations

from pathlib import Path

import trio

from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf, OpSettings
from ovmstrio.runtimes.ops.predictor.local_predict import LocalPredictor
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from tests.support.paddle_files import layers, write_described
from tests.support.trials import trying, verdicts


async def test_models_of_ops_and_of_scripts_are_tried_once_before_their_load(tmp_path: Path) -> None:
    folder = write_described(tmp_path / "model", *layers())
    settings = OpSettings("op", concurrency=2, local_service_conf=LocalServiceConf(str(folder)))
    async with trying(tmp_path / "trials"):
        await PredictorMaker(is_thread_op=True)(settings, 0)
        assert len(verdicts(tmp_path / "trials")) == 1
        predictor = LocalPredictor()
        await trio.to_thread.run_sync(predictor.load_model_config, str(folder), False, 0, False, 3)
        assert len(verdicts(tmp_path / "trials")) == 2
