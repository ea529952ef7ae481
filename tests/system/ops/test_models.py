from __future__ import annotations

from pathlib import Path

import pytest
import trio

from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf, OpSettings
from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config
from ovmstrio.runtimes.ops.examining import examine_pipeline
from ovmstrio.runtimes.ops.predictor.local_predict import LocalPredictor
from ovmstrio.runtimes.ops.predictor.make import PredictorMaker
from tests.support.ops import text_graph
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


@pytest.mark.parametrize(
    ("blocks", "problems"),
    [
        (
            (
                "  a:\n    local_service_conf:\n      model_config: nowhere\n"
                "  b:\n    server_endpoints: ['h:1']\n    client_type: brpc\n"
            ),
            [
                "F:5: op.a.local_service_conf.model_config: no such file or folder (expected a folder with serving_",
                "F:8: op.b.client_type: models cannot be reached in this way (expected kserve",
            ],
        ),
        (
            "  a:\n    local_service_conf:\n      model_config: nowhere\n      device_type: 4\n",
            ["F:6: op.a.local_service_conf.device_type: "],
        ),
    ],
    ids=["missing and unreachable", "device"],
)
async def test_models_that_cannot_be_loaded_are_reported(tmp_path: Path, blocks: str, problems: list[str]) -> None:
    file = tmp_path / "config.yml"
    file.write_text(f"rpc_port: 0\nop:\n{blocks}")
    graph, config = text_graph("a<@", "b<a"), examine_pipeline_config(file)
    found = [str(problem).replace(str(file), "F") for problem in await examine_pipeline(graph, config, load=True)]
    assert [text[: len(problem)] for text, problem in zip(found, problems, strict=True)] == problems
    assert await examine_pipeline(graph, config, load=False) == []
