from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.datatypes import BY_NAME
from ovmstrio.core.tensor import ANY_SIZE, Dim, Tensor, TensorSpec
from ovmstrio.runtimes.handlers.config.project_spec import (
    DEFAULT_MODEL,
    ModelEntry,
    ModelsSpec,
    ProjectBatching,
    ProjectSpec,
)
from ovmstrio.runtimes.handlers.models import running
from ovmstrio.runtimes.handlers.models.library import LibraryOptions
from ovmstrio.runtimes.handlers.models.opening import ProjectModels, open_models
from ovmstrio.runtimes.handlers.models.predictions import flat_list, read_inputs
from tests.support.model_projects import models_in
from tests.support.saved_models import (
    CLASSIFY,
    DOUBLE,
    FLOAT,
    STRING,
    TOTAL,
    attribute,
    node,
    write_classifier,
    write_saved_model,
)


def _project(root: Path, models: ModelsSpec | None, **more: Any) -> ProjectSpec:
    file = root / "nucleus.yaml"
    handler = root / "handler.py"
    return ProjectSpec(
        name="p", directory=root, file=file, type="tensorflow", python_path=root, handler_path=handler, models=models
    ).model_copy(update=more)


def _single(path: Path, key: str | None = None) -> ModelsSpec:
    entry = ModelEntry(name=DEFAULT_MODEL, path=str(path), signature_key=key)
    return ModelsSpec(section="models", kind="path", entries=(entry,), signature_key=key)


@asynccontextmanager
async def _open(tmp_path: Path, models: ModelsSpec | None, **more: Any) -> AsyncIterator[ProjectModels]:
    options = LibraryOptions(root=tmp_path / "down")
    async with open_models(_project(tmp_path, models, **more), options=options) as opened:
        yield opened


async def _predict(opened: ProjectModels, *args: Any) -> dict[str, Any]:
    client: Any = opened.clients["tensorflow_client"]
    return await trio.to_thread.run_sync(client.predict, *args)


async def test_outputs_are_flat_lists(tmp_path: Path) -> None:
    """Integers of 64 bits are strings, floats are the shortest numbers, and shapes are gone."""
    write_classifier(tmp_path / "up", 0.1)
    async with _open(tmp_path, _single(tmp_path / "up")) as opened:
        given: Mapping[str, Any] = {"features": [[1, 0, 0], [0, 2.0, 0]]}
        assert await _predict(opened, given) == {"class_ids": ["1", "1"], "scores": [0.0, 0.1, 0.4, 0.6]}
        client: Any = opened.clients["tensorflow_client"]
        assert await client.apredict(given) == await _predict(opened, given, None, "1")
        with pytest.raises(RuntimeError, match=r"await client\.apredict"):
            client.predict(given)


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
async def test_inputs_that_do_not_fit_are_told(tmp_path: Path, given: Any, message: str) -> None:
    """The message names the input, the model, and what was expected."""
    write_classifier(tmp_path / "up")
    async with _open(tmp_path, _single(tmp_path / "up")) as opened:
        with pytest.raises(UserRuntimeException, match=message):
            await _predict(opened, given)


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
async def test_the_signature_is_the_one_configured_or_the_only_one_or_predict(
    tmp_path: Path, signatures: Any, key: str | None, outputs: dict[str, Any]
) -> None:
    """In this order."""
    write_classifier(tmp_path / "up", **signatures)
    async with _open(tmp_path, _single(tmp_path / "up", key)) as opened:
        assert await _predict(opened, {"features": [[1, 0, 0]]}) == outputs


@pytest.mark.parametrize("key", [None, "c"])
async def test_several_signatures_need_a_choice(tmp_path: Path, key: str | None) -> None:
    """The error lists them."""
    write_classifier(tmp_path / "up", a=CLASSIFY, b=DOUBLE)
    async with _open(tmp_path, _single(tmp_path / "up", key)) as opened:
        with pytest.raises(UserRuntimeException, match="one of: a, b"):
            await _predict(opened, {"features": [[1, 0, 0]]})
        assert "one of: a, b" in opened.info()["model_metadata"][f"{DEFAULT_MODEL}-1"]["problem"]


async def test_versions_are_chosen_by_number(tmp_path: Path) -> None:
    """The highest one is the default; folders that hold no SavedModel are no versions."""
    for version in (9, 10):
        write_classifier(tmp_path / "up" / "m" / str(version), version)
    (tmp_path / "up" / "other").mkdir()
    (tmp_path / "up" / "other" / "model.txt").touch()
    async with _open(tmp_path, models_in(tmp_path / "up")) as opened:
        scores = [
            (await _predict(opened, {"features": [[1, 0, 0]]}, "m", version))["scores"][1]
            for version in ("latest", None, 9, "10")
        ]
        assert scores == [10.0, 10.0, 9.0, 10.0]
        for version in (1, 11):
            with pytest.raises(UserRuntimeException, match=f"m of version {version} wasn't found"):
                await _predict(opened, {}, "m", version)
        with pytest.raises(UserRuntimeException, match="'other' was not found"):
            await _predict(opened, {}, "other")
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


async def test_cached_models_are_loaded_when_they_are_asked_for(tmp_path: Path) -> None:
    """The limits hold, and ``/info`` has the form that cached models have."""
    for name in ("a", "b"):
        write_classifier(tmp_path / "up" / name / "3")
    async with _open(tmp_path, models_in(tmp_path / "up", 1, 1)) as opened:
        for name in "abab":
            assert (await _predict(opened, {"features": [[1, 0, 0]]}, name))["scores"] == [0.0, 1.0]
            assert opened.library is not None
            assert opened.library.shelf.counts() == (1, 1)
        assert opened.info()["model_metadata"]["a"]["versions"] == ["3"]


async def test_callers_share_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two callers' inputs are joined along the first dimension, and each gets what is its own."""
    write_classifier(tmp_path / "up")
    sizes: list[int] = []
    run_model = running.run_model

    async def counting(model: Any, arrays: Any) -> Any:
        sizes.append(len(arrays["features"]))
        return await run_model(model, arrays)

    monkeypatch.setattr(running, "run_model", counting)
    got: dict[int, Any] = {}
    batching = ProjectBatching(max_batch_size=3, interval_seconds=30)
    async with _open(tmp_path, _single(tmp_path / "up"), batching=batching) as opened:

        async def ask(rows: int) -> None:
            got[rows] = await _predict(opened, {"features": [[rows, 0, 0]] * rows})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            nursery.start_soon(ask, 2)
        assert sizes == [3]
        assert got[1] == {"class_ids": ["1"], "scores": [0.0, 1.0]}
        assert got[2] == {"class_ids": ["1", "1"], "scores": [0.0, 2.0, 0.0, 2.0]}


async def test_an_output_without_batches_cannot_be_joined(tmp_path: Path) -> None:
    """The error is the one that TensorFlow Serving's users know."""
    write_classifier(tmp_path / "up", total=TOTAL)
    batching = ProjectBatching(max_batch_size=4, interval_seconds=0.001)
    async with _open(tmp_path, _single(tmp_path / "up"), batching=batching) as opened:
        with pytest.raises(UserRuntimeException, match="Batched output tensor has 0 dimensions"):
            await _predict(opened, {"features": [[1, 0, 0]]})


async def test_an_input_without_batches_cannot_be_joined(tmp_path: Path) -> None:
    """The same of a scalar input."""
    f = attribute(kind=FLOAT)
    nodes = [node("x", "Placeholder", dtype=f, shape=attribute(shape=[])), node("y", "AddV2", ["x", "x"], T=f)]
    sides: tuple[Any, Any] = ({"a": ("x:0", FLOAT, [])}, {"b": ("y:0", FLOAT, [])})
    write_saved_model(tmp_path / "up", nodes, {"serving_default": sides})
    batching = ProjectBatching(max_batch_size=4, interval_seconds=0.001)
    async with _open(tmp_path, _single(tmp_path / "up"), batching=batching) as opened:
        with pytest.raises(UserRuntimeException, match="must have at least one dimension"):
            await _predict(opened, {"a": 1.5})
    async with _open(tmp_path, _single(tmp_path / "up")) as opened:
        assert await _predict(opened, {"a": 1.5}) == {"b": [3.0]}


async def test_strings_go_in_and_come_out(tmp_path: Path) -> None:
    """Texts and bytes are taken, and outputs are base64."""
    kind = attribute(kind=STRING)
    nodes = [node("x", "Placeholder", dtype=kind, shape=attribute(shape=[-1])), node("y", "Identity", ["x"], T=kind)]
    sides: tuple[Any, Any] = ({"text": ("x:0", STRING, [-1])}, {"same": ("y:0", STRING, [-1])})
    write_saved_model(tmp_path / "up", nodes, {"serving_default": sides})
    async with _open(tmp_path, _single(tmp_path / "up")) as opened:
        answer = await _predict(opened, {"text": ["ä", b"\xff"]})
        assert [base64.b64decode(value) for value in answer["same"]] == ["ä".encode(), b"\xff"]


async def test_outputs_have_the_names_of_the_signature(tmp_path: Path) -> None:
    """Two names of one tensor are both there, and so is an output that is an input passed on."""
    f = attribute(kind=FLOAT)
    nodes = [
        node("x", "Placeholder", dtype=f, shape=attribute(shape=[-1])),
        node("y", "AddV2", ["x", "x"], T=f),
        node("z", "Identity", ["x"], T=f),
    ]
    outputs = {"a": ("y:0", FLOAT, [-1]), "b": ("y:0", FLOAT, [-1]), "same": ("z:0", FLOAT, [-1])}
    sides: tuple[Any, Any] = ({"value": ("x:0", FLOAT, [-1])}, outputs)
    write_saved_model(tmp_path / "up", nodes, {"serving_default": sides})
    async with _open(tmp_path, _single(tmp_path / "up")) as opened:
        assert await _predict(opened, {"value": [1.0]}) == {"a": [2.0], "b": [2.0], "same": [1.0]}


async def test_a_project_without_models_has_nothing_to_tell(tmp_path: Path) -> None:
    """There is no client, and the description is empty."""
    async with _open(tmp_path, None) as opened:
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
def test_each_type_has_its_form(name: str, values: Any, flat: list[Any]) -> None:
    """The form is the one that the JSON of a protobuf message has."""
    datatype = BY_NAME[name]
    assert flat_list(Tensor("x", datatype, np.array(values, datatype.numpy))) == flat


@pytest.mark.parametrize(
    ("name", "value", "array"),
    [
        ("INT32", [1, 2], np.array([1, 2], np.int32)),
        ("UINT8", [1, 255], np.array([1, 255], np.uint8)),
        ("FP32", [1, 2], np.array([1, 2], np.float32)),
        ("FP32", np.array([1.5, 2]), np.array([1.5, 2], np.float32)),
        ("BYTES", ["ä", b"\0"], np.array(["ä".encode(), b"\0"], object)),
        ("UINT8", [1, 256], None),
        ("INT32", [1.5], None),
        ("INT64", [2**64], None),
        ("BYTES", [1], None),
    ],
)
def test_values_become_arrays_of_the_inputs_type(name: str, value: Any, array: Any) -> None:
    """What would lose its meaning on the way is refused."""
    inputs = [TensorSpec("x", BY_NAME[name], (ANY_SIZE,))]
    if array is None:
        with pytest.raises(UserRuntimeException, match="input 'x' of m does not fit"):
            read_inputs({"x": value}, inputs, "m")
    else:
        made = read_inputs({"x": value}, inputs, "m")["x"]
        assert made.dtype == array.dtype
        assert made.tolist() == array.tolist()


def test_inputs_that_do_not_matter_may_be_given() -> None:
    """A signature may have inputs that its outputs do not depend on."""
    inputs = [TensorSpec("x", BY_NAME["FP32"], (Dim.fixed(1),))]
    assert list(read_inputs({"x": [1], "y": 2}, inputs, "m", {"x", "y"})) == ["x"]
