"""The limits of a server and of its entries, as it is configured: for direct calls, and those of pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from ovmstrio.api.doors import KSERVE_REST
from ovmstrio.core.errors import Overloaded
from ovmstrio.dataplane.plane import DataPlane
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from tests.support import ir
from tests.support.servables import raw_request
from tests.support.served_in_thread import serving_plan
from tests.support.waits import WAIT_SECONDS


def _config(folder: Path) -> Path:
    base = ir.save(ir.dummy(), folder, "m")
    source: dict[str, Any] = {"b": {"node_name": "request", "data_item": "b"}}
    node: dict[str, Any] = {"name": "n", "model_name": "m", "type": "DL model", "inputs": [source]}
    node["outputs"] = [{"data_item": "a", "alias": "a"}]
    pipeline: dict[str, Any] = {"name": "p", "inputs": ["b"], "nodes": [node]}
    pipeline["outputs"] = [{"a": {"node_name": "n", "data_item": "a"}}]
    model = {"name": "m", "base_path": str(base), "max_concurrency": 1, "max_queue": 50}
    path = folder / "config.json"
    path.write_text(json.dumps({"model_config_list": [{"config": model}], "pipeline_config_list": [pipeline]}))
    return path


async def _sum(plane: DataPlane, name: str) -> float:
    request = raw_request({"b": np.ones((1, 10), np.float32)})
    request.model_name = name
    answer: Any = (await plane.infer(request, KSERVE_REST)).outputs[0]
    return float(answer.array.sum())


async def test_limits_of_server_and_entries_hold_together(tmp_path: Path) -> None:
    """Twenty calls of a pipeline and of its model through one place each are all answered; a full server refuses."""
    settings = ServerSettings(
        config_path=_config(tmp_path), port=0, rest_port=1, rest_bind_address="unix:" + str(tmp_path / "s"),
        max_concurrency=1, max_queue=30, file_system_poll_wait_seconds=0,
    )  # fmt: skip
    async with serving_plan(await read_plan(settings)) as served:
        plane = served.plane
        with trio.fail_after(WAIT_SECONDS):
            while not plane.readiness().ready:
                await plane.wait_change()
            sums: list[float] = []

            async def call(name: str) -> None:
                sums.append(await _sum(plane, name))

            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(call, "p")
                    nursery.start_soon(call, "m")
            assert sums == [20.0] * 20
            async with trio.open_nursery() as nursery:
                place = await plane.admit("p", "", KSERVE_REST)
                assert place is not None
                for _ in range(30):
                    nursery.start_soon(call, "p")
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(Overloaded, match=r"may have 1 \(--max_concurrency\) and 30 \(--max_queue\)"):
                    await _sum(plane, "p")
                place.release()
            assert sums == [20.0] * 50
