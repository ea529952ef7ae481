from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, Dim, TensorSpec
from ovmstrio.ops.predictor import local_model as devices
from ovmstrio.ops.predictor.local_model import count_workers, map_aliases, plugin_config, select_device
from ovmstrio.ops.predictor.model_config import CONFIG_FILE, ModelConfig, Variable, prepare, read_model_config
from ovmstrio.ops.predictor.protocol import FeedMismatch, FeedTypeError
from ovmstrio.ops.settings import LocalServiceConf

# The description of a model

_DESCRIPTION = """
# made by hand
feed_var { name: "image" alias_name: 'picture' is_lod_tensor: false feed_type: 7 shape: 3 shape: 224 shape: 224 }
feed_var <
  name: "scale"
  feed_type: 1
  shape: [1, 2]
>
fetch_var { name: "scores.tmp_0" alias_name: "scores" is_lod_tensor: true fetch_type: 0 }
"""


def _variables(text: str) -> tuple[Variable, ...]:
    pairs = (pair.split(":") for pair in text.split())
    return tuple(Variable(name, alias, lod=False, kind=1, shape=(3,)) for name, alias in pairs)


def _config(feeds: str, fetches: str) -> ModelConfig:
    """Return a description whose variables are given as ``name:alias name:alias``."""
    return ModelConfig(_variables(feeds), _variables(fetches))


def test_a_description_is_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(_DESCRIPTION, encoding="utf-8")
    config = read_model_config(tmp_path)
    assert config.feeds == (
        Variable("image", "picture", lod=False, kind=7, shape=(3, 224, 224)),
        Variable("scale", "scale", lod=False, kind=1, shape=(1, 2)),
    )
    assert config.fetches == (Variable("scores.tmp_0", "scores", lod=True, kind=0, shape=()),)
    assert [each.dtype for each in (*config.feeds, *config.fetches)] == [np.uint8, np.float32, np.int64]
    assert read_model_config(tmp_path / CONFIG_FILE) == config


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("feed_var { name: 3 }", [":1:", "invalid model configuration"]),
        ('feed_var { name: "x"', ["invalid model configuration"]),
        ("", ["no feed_var", "no fetch_var"]),
        ('feed_var { name: "x" feed_type: 99 } fetch_var { name: "y" }', ["x.feed_type", "found 99"]),
        ("feed_var { } fetch_var { }", ["a feed_var has no name", "a fetch_var has no name"]),
        (
            'feed_var { name: "x" alias_name: "a" } feed_var { name: "y" alias_name: "a" } fetch_var { name: "z" }',
            ["two feed_var are called 'a'"],
        ),
    ],
)
def test_every_problem_of_a_description_is_reported(tmp_path: Path, text: str, messages: list[str]) -> None:
    (tmp_path / CONFIG_FILE).write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)

    assert all(message in caught.value.message for message in [CONFIG_FILE, *messages])


def test_a_missing_description_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{CONFIG_FILE} is missing; .* by hand"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "outputs", "mapped"),
    [
        (_config("b:B a:A", "absent_1:P y:Q absent_2:R"), ["x", "y", "z"], {"x": "P", "y": "Q", "z": "R"}),
        (_config("b:B a:A", "y:Y"), ["x", "y"], {"y": "Y"}),
    ],
    ids=["by name, then by position", "fewer than the model has"],
)
def test_variables_are_matched_with_tensors(config: ModelConfig, outputs: list[str], mapped: dict[str, str]) -> None:
    mapping = map_aliases(config, ["a", "b"], outputs, "model")
    assert mapping.inputs == {"a": "A", "b": "B"}
    assert mapping.outputs == mapped


@pytest.mark.parametrize(
    ("feeds", "fetches", "message"),
    [
        ("a:A", "y:Y", "no feed_var for model inputs 'b'"),
        ("a:A b:B c:C", "y:Y", "more feed_var than tensors of the model: 'c'"),
        ("a:A b:B", "y:Y z:Z", "more fetch_var than tensors of the model: 'z'"),
    ],
)
def test_a_description_that_does_not_fit_its_model_is_refused(feeds: str, fetches: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        map_aliases(_config(feeds, fetches), ["a", "b"], ["y"], "model")


# Feeds

_ROWS = TensorSpec("x", BY_NAME["FP32"], (ANY_SIZE, Dim.fixed(3)))


def test_feeds_are_cast_and_ordered() -> None:
    number = TensorSpec("n", BY_NAME["INT64"], (ANY_SIZE,))
    arrays = prepare({"x": np.ones((2, 3)), "n": np.array([7.9]), "x.lod": 0}, [number, _ROWS], batch=True)
    assert [array.dtype for array in arrays] == [np.int64, np.float32]
    assert [array.tolist() for array in arrays] == [[7], [[1, 1, 1]] * 2]


def test_a_transposed_feed_keeps_its_values() -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2).T
    (prepared,) = prepare({"x": array}, [_ROWS], batch=True)
    assert prepared.flags.c_contiguous
    assert prepared.tolist() == array.tolist()


def test_texts_become_their_bytes() -> None:
    (array,) = prepare({"text": ["a", "ä"]}, [TensorSpec("text", BY_NAME["BYTES"], (ANY_SIZE,))], batch=True)
    assert array.tolist() == [b"a", b"\xc3\xa4"]


@pytest.mark.parametrize(
    ("feed", "error", "message"),
    [
        (
            {"y": np.ones((1, 3), np.int16)},
            FeedMismatch,
            r"missing \['x'\]; unknown \['y'\]\. Expected x: FP32 \[-1,3\]; given y: int16 \[1,3\]",
        ),
        ({"x": np.ones((1, 3)), "id": "7"}, FeedMismatch, r"unknown \['id'\]\. .*given x: float64 \[1,3\], id: str"),
        ({}, FeedMismatch, r"missing \['x'\]\. Expected .*; given nothing"),
        ({"x": np.ones((1, 4))}, FeedMismatch, r"shapes do not match .*FP32 \[-1,3\]; given x: float64 \[1,4\]$"),
        ({"x": np.ones(3)}, FeedMismatch, "Is the batch axis of x missing"),
        ({"x": 3.0}, FeedTypeError, "'x' is float"),
        ({"x": [1.0, 2.0, 3.0]}, FeedTypeError, r"'x' is list\[float\]"),
        ({"x": ["a", "b", "c"]}, FeedTypeError, r"FP32 \[-1,3\]; given x: list\[str\] of 3"),
        ({"x": np.array([["a", "b", "c"]])}, FeedTypeError, "cannot be cast to FP32"),
        ({"x": np.array([[None, {}, 1]])}, FeedTypeError, "cannot be cast to FP32"),
    ],
)
def test_a_wrong_feed_is_refused_with_the_expected_one(
    feed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        prepare(feed, [_ROWS], batch=True)


# Devices


@pytest.mark.parametrize(
    ("conf", "chosen"),
    [
        ({"device_type": -1}, ["CPU"] * 4),
        ({"device_type": 0, "devices": "0,1"}, ["CPU"] * 4),
        ({"device_type": 3}, ["CPU"] * 4),
        ({"device_type": -1, "devices": "0, 1"}, ["GPU.0", "GPU.1"] * 2),
        ({"device_type": 1, "devices": "0, 1"}, ["GPU.0", "GPU.1"] * 2),
        ({"device_type": 2, "devices": "1"}, ["GPU.1"] * 4),
    ],
)
def test_workers_take_the_devices_in_turn(
    monkeypatch: pytest.MonkeyPatch, conf: dict[str, Any], chosen: list[str]
) -> None:
    monkeypatch.setattr(devices, "available_devices", lambda: ["CPU", "GPU.0", "GPU.1"])
    settings = LocalServiceConf(**conf)
    assert [select_device(settings, worker) for worker in range(4)] == chosen
    assert count_workers(chosen[0], settings, 3) == chosen[:3].count(chosen[0])


def test_the_cpu_replaces_a_missing_gpu_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_devices", lambda: ["CPU", "GPU.0"])
    with capture_logs() as logs:
        assert select_device(LocalServiceConf(device_type=1, devices="9"), 0) == "CPU"
    assert [(line["log_level"], line["wanted"]) for line in logs] == [("warning", "GPU.9")]


@pytest.mark.parametrize(("conf", "path"), [({"device_type": 4}, "device_type"), ({"devices": "a"}, "devices")])
def test_other_devices_are_refused(conf: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        select_device(LocalServiceConf(**conf), 0)


@pytest.mark.parametrize(
    ("precision", "hint", "warnings"),
    [("fp32", "f32", 0), ("bf16", "bf16", 0), ("fp16", "f16", 0), ("int8", "f32", 1), ("fp7", "f32", 1)],
)
def test_every_precision_has_a_hint(precision: str, hint: str, warnings: int) -> None:
    with capture_logs() as logs:
        config = plugin_config(LocalServiceConf(precision=precision), "CPU", 1)
    assert config["INFERENCE_PRECISION_HINT"] == hint
    assert len(logs) == warnings


def test_threads_and_streams_grow_with_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    configs = [plugin_config(LocalServiceConf(thread_num=3), "CPU", workers) for workers in (1, 2, 4)]
    assert [config["INFERENCE_NUM_THREADS"] for config in configs] == ["3", "6", "8"]
    assert [config["NUM_STREAMS"] for config in configs] == ["1", "2", "4"]
