"""Examination of Ops whose models cannot be loaded."""

from __future__ import annotations

from pathlib import Path

from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config
from ovmstrio.runtimes.ops.examining import examine_pipeline
from ovmstrio.runtimes.ops.graph import OpGraph
from tests.support.ops import text_graph


async def _problems(tmp_path: Path, config: str, graph: OpGraph | None = None, *, load: bool = True) -> list[str]:
    file = tmp_path / "config.yml"
    file.write_text(f"rpc_port: 0\n{config}")
    found = await examine_pipeline(graph or text_graph("a<@", "b<a"), examine_pipeline_config(file), load=load)
    return [str(problem).replace(str(file), "F") for problem in found]


async def test_models_that_cannot_be_had(tmp_path: Path) -> None:
    """Models that are not there, or cannot be reached in the way that is asked for, are told, all of them."""
    config = (
        "op:\n  a:\n    local_service_conf:\n      model_config: nowhere\n  b:\n    server_endpoints: ['h:1']\n"
        "    client_type: brpc\n"
    )
    missing, unsupported = await _problems(tmp_path, config)
    assert missing.startswith(
        "F:5: op.a.local_service_conf.model_config: no such file or folder (expected a folder with serving_server"
    )
    assert unsupported.startswith("F:8: op.b.client_type: models cannot be reached in this way (expected kserve")
    assert await _problems(tmp_path, config, load=False) == []
    device = "op:\n  a:\n    local_service_conf:\n      model_config: nowhere\n      device_type: 4\n"
    (text,) = await _problems(tmp_path, device)
    assert text.startswith("F:6: op.a.local_service_conf.device_type: ")
