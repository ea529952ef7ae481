"""Devices that a machine with a CPU has, and errors for those that it lacks; docs/devices.md says the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openvino as ov
import pytest

from tests.support import ir
from tests.support.commands import run_command
from tests.support.served_in_thread import ServedInThread, serving_in_thread

DEVICES = ("CPU", "AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU", "BATCH:CPU")
BATCHING = {"max_batch_size": 4, "batch_timeout_ms": 1}


def _write_config(folder: Path, devices: tuple[str, ...]) -> Path:
    ir.save(ir.dummy((1, 4)), folder, "fixed")
    ir.save(ir.dummy((-1, 4)), folder, "batched")
    ir.save(ir.accumulator(), folder, "stateful")
    options: dict[str, dict[str, Any]] = {
        "fixed": {},
        "batched": {"batching": BATCHING},
        "stateful": {"stateful": True},
    }
    entries = [
        {"config": {"name": f"{model} {device}", "base_path": model, "target_device": device, **further}}
        for device in devices
        for model, further in options.items()
    ]
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    return config


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedInThread]:
    with serving_in_thread(config_path=_write_config(tmp_path_factory.mktemp("devices"), DEVICES)) as server:
        yield server


def _infer(server: ServedInThread, name: str, inputs: dict[str, list[float]], **parameters: Any) -> list[float]:
    tensors = [{"name": key, "datatype": "FP32", "shape": [1, len(data)], "data": data} for key, data in inputs.items()]
    response = server.ask("POST", f"/v2/models/{name}/infer", json={"inputs": tensors, "parameters": parameters})
    assert response.status_code == 200, response.text
    data: list[float] = response.json()["outputs"][0]["data"]
    return data


@pytest.mark.parametrize("device", DEVICES)
def test_models_answer_alike_on_each_device_that_uses_the_cpu(served: ServedInThread, device: str) -> None:
    for model in ("fixed", "batched"):
        assert _infer(served, f"{model} {device}", {"b": [1, 2, 3, 4]}) == [2, 3, 4, 5]
    start, end = {"sequence_start": True}, {"sequence_end": True}
    assert _infer(served, f"stateful {device}", {"x": [1, 2]}, sequence_id=1, **start) == [1, 2]
    assert _infer(served, f"stateful {device}", {"x": [3, 4]}, sequence_id=1, **end) == [4, 6]


@pytest.mark.parametrize("device", ["GPU", "NPU", "AUTO:GPU,CPU", "CPUX"])
def test_a_device_that_the_machine_lacks_is_an_error_that_names_it(device: str, tmp_path: Path) -> None:
    if any(each.split(".")[0] in device.replace("AUTO", "") for each in ov.Core().available_devices if each != "CPU"):
        pytest.skip(f"the machine has the device {device}")
    result = run_command("check", str(_write_config(tmp_path, (device,))), "--json")
    assert result.exit_code == 1
    problems = json.loads(result.stdout)["problems"]
    assert len(problems) == 3
    assert all(each["message"].startswith(f"Cannot compile model into target device - {device}: ") for each in problems)
