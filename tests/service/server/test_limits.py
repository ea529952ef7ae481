from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ovmstrio.core.errors import Overloaded, QueueTimeExceeded
from ovmstrio.serving.interfaces import KSERVE_REST
from tests.support import ir
from tests.support.all_kinds import write_all_kinds
from tests.support.pipelines import pipeline_entry
from tests.support.servables import raw_request
from tests.support.system_servers import write_config
from tests.support.traced_servers import serving
from tests.support.waits import WAIT_SECONDS


async def test_limits_of_server_and_model_apply_to_calls_of_model_and_pipeline(tmp_path: Path) -> None:
    ir.save(ir.dummy(), tmp_path, "m")
    model = {"name": "m", "base_path": "m", "max_concurrency": 1, "max_queue": 50}
    config = write_config(tmp_path, model, pipeline_config_list=[pipeline_entry("p", "m")])
    sums: list[float] = []
    async with serving(config, max_concurrency=1, max_queue=30) as server:

        async def call(name: str) -> None:
            request = raw_request({"b": np.ones((1, 10), np.float32)})
            request.model_name = name
            output: Any = (await server.plane.infer(request, KSERVE_REST)).outputs[0]
            sums.append(float(output.array.sum()))

        async with trio.open_nursery() as nursery:
            for name in "pm" * 10:
                nursery.start_soon(call, name)
        assert sums == [20.0] * 20
        async with trio.open_nursery() as nursery:
            place = await server.plane.admit("p", "", KSERVE_REST)
            assert place is not None
            for _ in range(30):
                nursery.start_soon(call, "p")
            await wait_all_tasks_blocked()
            with pytest.raises(Overloaded, match=r"may have 1 \(--max-concurrency\) and 30 \(--max-queue\)"):
                await call("p")
            place.release()
        assert sums == [20.0] * 50


@pytest.mark.parametrize("place", ["entry", "option"])
async def test_queued_calls_of_every_kind_are_refused_after_the_queue_time(tmp_path: Path, place: str) -> None:
    write_all_kinds(tmp_path)
    file = tmp_path / "config.json"
    document = json.loads(file.read_text())
    limits = {"max_concurrency": 1} | ({"max_queue_time": 0.1} if place == "entry" else {})
    entries = [each["config"] for each in document["model_config_list"]]
    entries += [
        entry
        for key in ("mediapipe_config_list", "pipeline_config_list", "handler_config_list", "op_pipeline_config_list")
        for entry in document[key]
    ]
    for entry in entries:
        entry.update(limits)
    file.write_text(json.dumps(document))
    async with serving(file, **({} if place == "entry" else {"max_queue_time": 0.1})) as server:
        for entry in entries:
            name = entry["name"]
            held = await server.plane.admit(name, "", KSERVE_REST)
            assert held is not None
            with trio.fail_after(WAIT_SECONDS), pytest.raises(QueueTimeExceeded, match=r"0\.1 s \(max_queue_time\)"):
                await server.plane.admit(name, "", KSERVE_REST)
            held.release()
            again = await server.plane.admit(name, "", KSERVE_REST)
            assert again is not None
            again.release()
