"""Paddle Serving's settings in OpenVINO's words."""

from __future__ import annotations

import os

import pytest
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino import runtime
from ovmstrio.runtimes.ops.config.op_settings import LocalServiceConf
from ovmstrio.runtimes.ops.predictor import devices
from ovmstrio.runtimes.ops.predictor.devices import device_for, plugin_config, workers_on


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have two GPUs."""
    monkeypatch.setattr(devices, "devices", lambda: ["CPU", "GPU.0", "GPU.1"])


@pytest.mark.parametrize(("kind", "numbers"), [(-1, ""), (0, ""), (0, "0,1"), (3, "")])
def test_cpu(kind: int, numbers: str) -> None:
    """The kinds of CPU are the CPU, whatever devices are listed; so is an empty list."""
    assert device_for(LocalServiceConf(device_type=kind, devices=numbers), 1) == "CPU"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("kind", [-1, 1, 2])
def test_workers_take_turns(kind: int) -> None:
    """Worker i has the device i modulo their number."""
    conf = LocalServiceConf(device_type=kind, devices="0, 1")

    assert [device_for(conf, worker) for worker in range(4)] == ["GPU.0", "GPU.1", "GPU.0", "GPU.1"]
    assert workers_on("GPU.0", conf, 3) == 2


def test_the_cpu_takes_the_place_of_a_missing_gpu() -> None:
    """Without such a GPU the model runs on the CPU, and a warning says so."""
    assert "GPU.9" not in runtime.devices()
    with capture_logs() as logs:
        assert device_for(LocalServiceConf(device_type=1, devices="9"), 0) == "CPU"
    assert [(line["log_level"], line["wanted"]) for line in logs] == [("warning", "GPU.9")]


@pytest.mark.parametrize(("conf", "path"), [({"device_type": 4}, "device_type"), ({"devices": "a"}, "devices")])
def test_refuses_other_devices(conf: dict[str, int], path: str) -> None:
    """Kinds that OpenVINO has not, and lists of something else, are refused."""
    with pytest.raises(ConfigError, match=path):
        device_for(LocalServiceConf(**conf), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "hint", "warns"),
    [("fp32", "f32", 0), ("bf16", "bf16", 0), ("fp16", "f16", 0), ("int8", "f32", 1), ("fp7", "f32", 1)],
)
def test_precision_is_explicit(precision: str, hint: str, warns: int) -> None:
    """Every precision sets OpenVINO's hint; unknown ones fall back to fp32 with a warning."""
    with capture_logs() as logs:
        config = plugin_config(LocalServiceConf(precision=precision), "CPU", 1)
    assert config["INFERENCE_PRECISION_HINT"] == hint
    assert len(logs) == warns


def test_threads_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has its threads as far as there are processors, and a stream."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    settings = [plugin_config(LocalServiceConf(thread_num=3), "CPU", workers) for workers in (1, 2, 4)]

    assert [config["INFERENCE_NUM_THREADS"] for config in settings] == ["3", "6", "8"]
    assert [config["NUM_STREAMS"] for config in settings] == ["1", "2", "4"]
