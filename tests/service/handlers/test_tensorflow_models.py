from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.tensor import ANY_SIZE, BY_NAME, Dim, Tensor, TensorSpec
from ovmstrio.handlers.config.project_spec import DEFAULT_MODEL, ProjectBatching
from ovmstrio.handlers.models import saved_model_run as running
from ovmstrio.handlers.models.client import to_flat_list, to_input_arrays
from tests.support.model_projects import models_in
from tests.support.pipelines import gather
from tests.support.saved_models import (
    CLASSIFY,
    DOUBLE,
    FLOAT,
    STRING,
    TOTAL,
    attribute,
    node,
    open_tensorflow_models,
    predict,
    single_model,
    write_classifier,
    write_saved_model,
)


async def test_outputs_are_flat_lists(tmp_path: Path) -> None:
    write_classifier(tmp_path / "up", 0.1)
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up")) as opened:
        features = {"features": [[1, 0, 0], [0, 2.0, 0]]}
        # Integers of 64 bits are strings.
        assert await predict(opened, features) == {"class_ids": ["1", "1"], "scores": [0.0, 0.1, 0.4, 0.6]}
        client: Any = opened.clients["tensorflow_client"]
        assert await client.apredict(features) == await predict(opened, features, None, "1")
        with pytest.raises(RuntimeError, match=r"await client\.apredict"):
            client.predict(features)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "missing key 'features' for model _cortex_default of version 1"),
        ({"features": [[1, 2, 3]], "more": 1}, "has no input 'more'"),
        ({"features": [1, 2, 3]}, r"shape \(-1, 3\) of FP32: the shape is \(3\)"),
        ({"features": [["a", "b", "c"]]}, "the values are str"),
        ({"features": [[1, 2], [3]]}, "'features' .* does not fit"),
        (None, "must be a dict"),
    ],
)
async def test_wrong_inputs_are_refused(tmp_path: Path, given: Any, message: str) -> None:
    write_classifier(tmp_path / "up")
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up")) as opened:
        with pytest.raises(UserRuntimeException, match=message):
            await predict(opened, given)


@pytest.mark.parametrize(
    ("signatures", "key", "outputs"),
    [
        ({"only": DOUBLE}, None, {"doubled": [0.0, 2.0]}),
        ({"serving_default": CLASSIFY, "predict": DOUBLE}, None, {"doubled": [0.0, 2.0]}),
        (
            {"serving_default": CLASSIFY, "predict": DOUBLE},
            "serving_default",
            {"class_ids": ["1"], "scores": [0.0, 1.0]},
        ),
        ({"a": CLASSIFY, "b": DOUBLE}, "b", {"doubled": [0.0, 2.0]}),
        ({"__saved_model_init_op": ({}, {}), "b": DOUBLE}, None, {"doubled": [0.0, 2.0]}),
        (
            {"__saved_model_init_op": ({}, {"__saved_model_init_op": ("x:0", FLOAT, [])}), "b": DOUBLE},
            None,
            {"doubled": [0.0, 2.0]},
        ),
    ],
)
async def test_choice_of_the_signature(
    tmp_path: Path, signatures: Any, key: str | None, outputs: dict[str, Any]
) -> None:
    write_classifier(tmp_path / "up", **signatures)
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up", key)) as opened:
        assert await predict(opened, {"features": [[1, 0, 0]]}) == outputs


@pytest.mark.parametrize("key", [None, "c"])
async def test_several_signatures_need_a_choice(tmp_path: Path, key: str | None) -> None:
    write_classifier(tmp_path / "up", a=CLASSIFY, b=DOUBLE)
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up", key)) as opened:
        with pytest.raises(UserRuntimeException, match="one of: a, b"):
            await predict(opened, {"features": [[1, 0, 0]]})
        assert "one of: a, b" in opened.info()["model_metadata"][f"{DEFAULT_MODEL}-1"]["problem"]


async def test_versions_of_a_model(tmp_path: Path) -> None:
    for version in (9, 10):
        write_classifier(tmp_path / "up" / "m" / str(version), version)
    (tmp_path / "up" / "other").mkdir()
    (tmp_path / "up" / "other" / "model.txt").touch()
    async with open_tensorflow_models(tmp_path, models_in(tmp_path / "up")) as opened:
        scores = [
            (await predict(opened, {"features": [[1, 0, 0]]}, "m", version))["scores"][1]
            for version in ("latest", None, 9, "10")
        ]
        assert scores == [10.0, 10.0, 9.0, 10.0]
        for version in (1, 11):
            with pytest.raises(UserRuntimeException, match=f"m of version {version} wasn't found"):
                await predict(opened, {}, "m", version)
        with pytest.raises(UserRuntimeException, match="'other' was not found"):
            await predict(opened, {}, "other")
        info = opened.info()["model_metadata"]
        assert list(info) == ["m-10", "m-9"]
        assert info["m-9"]["signature_key"] == "serving_default"
        assert info["m-9"]["input_signatures"] == {"features": {"shape": [-1, 3], "type": "float32"}}
        described = info["m-9"]["signature_def"]["serving_default"]
        assert described["outputs"]["class_ids"] == {
            "dtype": "DT_INT64",
            "tensor_shape": {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False},
            "name": "best:0",
        }
        assert await trio.Path(info["m-9"]["disk_path"], "saved_model.pb").is_file()


async def test_cached_models_are_loaded_at_their_first_use(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_classifier(tmp_path / "up" / name / "3")
    async with open_tensorflow_models(tmp_path, models_in(tmp_path / "up", 1, 1)) as opened:
        for name in "abab":
            assert (await predict(opened, {"features": [[1, 0, 0]]}, name))["scores"] == [0.0, 1.0]
            assert opened.library is not None
            assert opened.library.cache.counts() == (1, 1)
        assert opened.info()["model_metadata"]["a"]["versions"] == ["3"]


async def test_requests_are_run_in_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_classifier(tmp_path / "up")
    sizes: list[int] = []
    run_model = running.run_model

    async def counting(model: Any, arrays: Any) -> Any:
        sizes.append(len(arrays["features"]))
        return await run_model(model, arrays)

    monkeypatch.setattr(running, "run_model", counting)
    batching = ProjectBatching(max_batch_size=3, interval_seconds=30)
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up"), batching) as opened:
        inputs = [{"features": [[rows, 0, 0]] * rows} for rows in (1, 2)]
        one, two = await gather(lambda each: predict(opened, each), inputs)
    assert sizes == [3]
    assert one == {"class_ids": ["1"], "scores": [0.0, 1.0]}
    assert two == {"class_ids": ["1", "1"], "scores": [0.0, 2.0, 0.0, 2.0]}


def _placeholder(kind: Any, *shape: int) -> bytes:
    return node("x", "Placeholder", dtype=kind, shape=attribute(shape=list(shape)))


async def test_tensors_without_a_batch_cannot_be_joined(tmp_path: Path) -> None:
    batching = ProjectBatching(max_batch_size=4, interval_seconds=0.001)
    write_classifier(tmp_path / "output", total=TOTAL)
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "output"), batching) as opened:
        with pytest.raises(UserRuntimeException, match="Batched output tensor has 0 dimensions"):
            await predict(opened, {"features": [[1, 0, 0]]})
    f = attribute(kind=FLOAT)
    sides: tuple[Any, Any] = ({"a": ("x:0", FLOAT, [])}, {"b": ("y:0", FLOAT, [])})
    nodes = [_placeholder(f), node("y", "AddV2", ["x", "x"], T=f)]
    write_saved_model(tmp_path / "input", nodes, {"serving_default": sides})
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "input"), batching) as opened:
        with pytest.raises(UserRuntimeException, match="must have at least one dimension"):
            await predict(opened, {"a": 1.5})
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "input")) as opened:
        assert await predict(opened, {"a": 1.5}) == {"b": [3.0]}


async def test_texts_and_bytes_are_answered_as_base64(tmp_path: Path) -> None:
    kind = attribute(kind=STRING)
    sides: tuple[Any, Any] = ({"text": ("x:0", STRING, [-1])}, {"same": ("y:0", STRING, [-1])})
    nodes = [_placeholder(kind, -1), node("y", "Identity", ["x"], T=kind)]
    write_saved_model(tmp_path / "up", nodes, {"serving_default": sides})
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up")) as opened:
        answer = await predict(opened, {"text": ["ä", b"\xff"]})
        assert [base64.b64decode(value) for value in answer["same"]] == ["ä".encode(), b"\xff"]


async def test_outputs_have_the_names_of_the_signature(tmp_path: Path) -> None:
    f = attribute(kind=FLOAT)
    nodes = [_placeholder(f, -1), node("y", "AddV2", ["x", "x"], T=f), node("z", "Identity", ["x"], T=f)]
    outputs = {"a": ("y:0", FLOAT, [-1]), "b": ("y:0", FLOAT, [-1]), "same": ("z:0", FLOAT, [-1])}
    sides: tuple[Any, Any] = ({"value": ("x:0", FLOAT, [-1])}, outputs)
    write_saved_model(tmp_path / "up", nodes, {"serving_default": sides})
    async with open_tensorflow_models(tmp_path, single_model(tmp_path / "up")) as opened:
        assert await predict(opened, {"value": [1.0]}) == {"a": [2.0], "b": [2.0], "same": [1.0]}


async def test_a_project_without_models(tmp_path: Path) -> None:
    async with open_tensorflow_models(tmp_path, None) as opened:
        assert (opened.clients, opened.info(), opened.is_stale) == ({}, {}, False)


@pytest.mark.parametrize(
    ("name", "values", "flat"),
    [
        ("FP32", [[0.1, float("nan")], [float("inf"), float("-inf")]], [0.1, "NaN", "Infinity", "-Infinity"]),
        ("FP64", [0.1], [0.1]),
        ("FP16", [1.0], [0x3C00]),
        ("BF16", [0x3F80], [0x3F80]),
        ("INT32", [[1], [2]], [1, 2]),
        ("UINT8", 7, [7]),
        ("INT64", [-(2**63)], ["-9223372036854775808"]),
        ("UINT64", [2**64 - 1], ["18446744073709551615"]),
        ("BOOL", [True, False], [True, False]),
        ("BYTES", [b"\xffa", b""], [base64.b64encode(b"\xffa").decode(), ""]),
        ("FP32", [], []),
    ],
)
def test_values_have_the_form_of_protobufs_json(name: str, values: Any, flat: list[Any]) -> None:
    datatype = BY_NAME[name]
    assert to_flat_list(Tensor("x", datatype, np.array(values, datatype.numpy))) == flat


@pytest.mark.parametrize(
    ("name", "value", "array"),
    [
        ("INT32", [1, 2], np.array([1, 2], np.int32)),
        ("UINT8", [1, 255], np.array([1, 255], np.uint8)),
        ("FP32", [1, 2], np.array([1, 2], np.float32)),
        ("FP32", np.array([1.5, 2]), np.array([1.5, 2], np.float32)),
        ("BYTES", ["ä", b"\0"], np.array(["ä".encode(), b"\0"], object)),
    ],
)
def test_values_are_cast_to_the_type_of_their_input(name: str, value: Any, array: Any) -> None:
    made = to_input_arrays({"x": value}, [TensorSpec("x", BY_NAME[name], (ANY_SIZE,))], "m")["x"]
    assert made.dtype == array.dtype
    assert made.tolist() == array.tolist()


@pytest.mark.parametrize(("name", "value"), [("UINT8", [1, 256]), ("INT32", [1.5]), ("INT64", [2**64]), ("BYTES", [1])])
def test_values_that_would_change_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserRuntimeException, match="input 'x' of m does not fit"):
        to_input_arrays({"x": value}, [TensorSpec("x", BY_NAME[name], (ANY_SIZE,))], "m")


def test_unused_inputs_of_a_signature_may_be_given() -> None:
    inputs = [TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(1),))]
    assert list(to_input_arrays({"x": [1], "y": 2}, inputs, "m", {"x", "y"})) == ["x"]
