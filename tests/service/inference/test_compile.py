from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.specs import BatchSpec, LayoutSpec, ModelSpec, ShapeSpec
from ovmstrio.config.tensor_mapping import TensorMapping
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import ANY_SIZE, Dim
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.inference.compiled import Compiled
from ovmstrio.inference.network import Network
from ovmstrio.inference.runtime import core
from tests.support import ir
from tests.support.servables import EXACT

pytestmark = pytest.mark.compiles

FIXED = Dim.fixed


def compiled(model: ov.Model, repository: Path, mapping: TensorMapping | None = None, **settings: Any) -> Compiled:
    base_path = ir.save(model, repository, "model")
    settings["plugin_config"] = {**EXACT, **settings.get("plugin_config", {})}
    spec = ModelSpec(name="model", base_path=base_path, origin="config.json", **settings)
    return compile_model(ModelFile(base_path / "1" / "model.xml", spec, mapping or TensorMapping()))


def _several(model: ov.Model, repository: Path, hint: dict[str, str]) -> Iterator[Compiled]:
    for _ in range(8):
        yield compiled(model, repository, plugin_config=hint)


def test_signature_is_sorted_by_name(tmp_path: Path) -> None:
    signature = compiled(ir.sum_of_two(), tmp_path).signature
    assert [spec.name for spec in signature.inputs] == ["x", "y"]
    assert [spec.name for spec in signature.outputs] == ["difference", "sum"]
    assert signature.output_ports == (1, 0)
    assert signature.inputs[0].shape == (FIXED(1), FIXED(10))


def test_aliases_of_the_mapping_replace_and_order_names(tmp_path: Path) -> None:
    mapping = TensorMapping({"x": "zeta", "y": "alpha"}, {"sum": "total"})
    signature = compiled(ir.sum_of_two(), tmp_path, mapping).signature
    assert [spec.name for spec in signature.inputs] == ["alpha", "zeta"]
    assert signature.input_ports == (1, 0)
    assert [spec.name for spec in signature.outputs] == ["difference", "total"]


@pytest.mark.parametrize("datatype", list(ir.TYPES))
def test_every_datatype_is_reported(datatype: str, tmp_path: Path) -> None:
    model = ir.string_passthrough() if datatype == "BYTES" else ir.passthrough(datatype)
    signature = compiled(model, tmp_path).signature
    assert [spec.datatype.name for spec in (*signature.inputs, *signature.outputs)] == [datatype, datatype]


def _four_bit() -> ov.Model:
    x = op.parameter([2, 2], ov.Type.u4)
    x.output(0).set_names({"x"})
    return ov.Model([op.result(op.convert(x, "f32"))], [x], "u4")


def _shapes(**dims: list[Dim]) -> dict[str, Any]:
    return {"shapes": {name.removeprefix("_"): ShapeSpec(dims=tuple(each)) for name, each in dims.items()}}


def _layout(layout: str) -> dict[str, Any]:
    return {"layouts": {"": LayoutSpec(tensor=layout)}}


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        (ir.dummy(), _shapes(bb=[FIXED(2)]), "did you mean 'b'"),
        (ir.dummy(), {"layouts": {"c": LayoutSpec(tensor="NC")}}, "layout names a tensor that the model does not have"),
        (ir.dummy(), {**_shapes(b=[FIXED(size) for size in (1, 2, 3, 4)]), **_layout("NHWC")}, "layout"),
        (ir.dummy(), {"mean": (1.0,)}, "mean needs a layout"),
        (ir.dummy(), {"precisions": {"": "FLOAT"}}, "unknown precision 'FLOAT'"),
        (ir.dummy(), {"color_formats": {"": "PINK"}, **_layout("NC")}, "unknown color_format 'PINK'"),
        (ir.dummy(), {"plugin_config": {"NUM_STREAMZ": "1"}}, "did you mean NUM_STREAMS"),
        (ir.dummy(), {"plugin_config": {"PERFORMANCE_HINT": "FAST"}}, "Cannot compile model into target device.*FAST"),
        (ir.dummy(), {"target_device": "TOASTER"}, "devices here: .*CPU"),
        (
            ir.dummy(),
            {"mapping": TensorMapping({"b": "data"}), **_shapes(b=[FIXED(2), FIXED(10)])},
            r"mapping_config.json replaces.*'data'",
        ),
        (ir.sum_of_two(), _shapes(_=[FIXED(1), FIXED(5)]), "without a tensor name, but the model has 2: x, y"),
        (
            ir.sum_of_two(),
            _shapes(x=[FIXED(1), FIXED(3)], y=[FIXED(1), FIXED(4)]),
            r"does not accept the shapes x: \(1,3\), y: \(1,4\)",
        ),
        (ir.dummy(), {"batch": BatchSpec(dim=FIXED(7)), **_layout("HW")}, "no input of 'model' has a batch dimension"),
        (_four_bit(), {}, "element type u4"),
        (ir.dummy(ov.PartialShape.dynamic()), {}, "no fixed number of dimensions"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    model: ov.Model, settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        compiled(model, tmp_path, **settings)


@pytest.mark.parametrize(
    ("model", "settings", "shape", "batch_axis"),
    [
        pytest.param(ir.dummy(), _shapes(_=[Dim(1, 4), ANY_SIZE]), [Dim(1, 4), ANY_SIZE], 0, id="shape"),
        pytest.param(
            ir.dummy(ov.PartialShape.dynamic()), _shapes(_=[FIXED(2), FIXED(3)]), [FIXED(2), FIXED(3)], 0, id="rank"
        ),
        *(
            pytest.param(ir.sum_of_two(), {"batch": BatchSpec(dim=dim)}, [dim, FIXED(10)], 0, id=f"batch {dim}")
            for dim in (FIXED(8), ANY_SIZE, Dim(2, 8))
        ),
        pytest.param(
            ir.dummy(), {"batch": BatchSpec(dim=FIXED(7)), **_layout("CN")}, [FIXED(1), FIXED(7)], 1, id="batch of CN"
        ),
    ],
)
def test_shape_and_batch_size_are_those_of_each_input(
    model: ov.Model, settings: dict[str, Any], shape: list[Dim], batch_axis: int, tmp_path: Path
) -> None:
    inputs = compiled(model, tmp_path, **settings).signature.inputs
    assert [(each.shape, each.batch_axis) for each in inputs] == [(tuple(shape), batch_axis)] * len(inputs)


@pytest.mark.parametrize(
    ("shape", "model_layout", "axes"),
    [
        pytest.param((1, 3, 2, 4), "NCHW", (0, 3, 1, 2), id="of a model of channels first"),
        pytest.param((1, 2, 4, 3), "", (0, 1, 2, 3), id="alone"),
    ],
)
async def test_layout_transposes_only_for_a_model_of_another_layout(
    shape: tuple[int, ...], model_layout: str, axes: tuple[int, ...], tmp_path: Path
) -> None:
    model = ir.passthrough("FP32", shape, input_name="image", output_name="pixels")
    made = compiled(model, tmp_path, layouts={"image": LayoutSpec(tensor="NHWC", model=model_layout)})
    (image,) = made.signature.inputs
    assert (image.reported_shape, image.layout) == ([1, 2, 4, 3], "NHWC")
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 4, 3)
    np.testing.assert_array_equal((await Network(made).infer([x]))[0], x.transpose(axes))


async def test_precision_mean_scale_and_colours(tmp_path: Path) -> None:
    made = compiled(
        ir.image_passthrough(2, 2),
        tmp_path,
        layouts={"image": LayoutSpec(tensor="NHWC")},
        precisions={"": "UINT8"},
        color_formats={"": "BGR:RGB"},
        mean=(1.0, 2.0, 3.0),
        scale=(2.0,),
    )
    assert made.signature.inputs[0].datatype.name == "UINT8"
    x = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    expected = (x[..., ::-1].astype(np.float32) - np.array([1, 2, 3], np.float32)) / 2
    np.testing.assert_allclose((await Network(made).infer([x]))[0], expected)


@pytest.mark.parametrize("model", [ir.dummy(), ir.dummy([-1, 10])])
@pytest.mark.parametrize(
    ("hint", "threads", "streams"),
    [
        ({}, 1, 1),
        ({"PERFORMANCE_HINT": "LATENCY"}, 1, 1),
        ({"NUM_STREAMS": "2"}, 2, 2),
        ({"INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "2"}, 2, 2),
    ],
)
def test_small_model_has_one_thread_unless_its_user_wants_more(
    model: ov.Model, hint: dict[str, str], threads: int, streams: int, tmp_path: Path
) -> None:
    # The model is timed, and other processes may have the cores at that moment.
    made = next(one for one in _several(model, tmp_path, hint) if one.placement.is_inline)
    assert made.streams == streams
    if os.cpu_count() != 1:
        assert made.model.get_property("INFERENCE_NUM_THREADS") == threads


@pytest.mark.parametrize(("plugin_config", "is_bound"), [({}, False), ({"ENABLE_CPU_PINNING": "YES"}, True)])
def test_inline_model_is_bound_to_no_core_unless_its_user_wants_it(
    plugin_config: dict[str, str], *, is_bound: bool, tmp_path: Path
) -> None:
    made = next(one for one in _several(ir.dummy(), tmp_path, plugin_config) if one.placement.is_inline)
    assert made.model.get_property("ENABLE_CPU_PINNING") is is_bound


def test_slow_model_has_the_latency_hint_and_never_runs_inline(tmp_path: Path) -> None:
    made = compiled(ir.slow(256, 40), tmp_path)
    assert made.model.get_property("PERFORMANCE_HINT") == "LATENCY"
    assert not made.placement.is_inline


def test_nireq_is_twice_the_optimal_number_unless_configured(tmp_path: Path) -> None:
    assert compiled(ir.dummy(), tmp_path, nireq=7).nireq == 7
    made = compiled(ir.dummy(), tmp_path)
    assert made.concurrency == made.model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
    assert made.nireq == 2 * made.concurrency


def test_compile_cache_needs_allow_cache_for_models_that_follow_requests(tmp_path: Path) -> None:
    auto: dict[str, Any] = {"shapes": {"": ShapeSpec(auto=True)}}
    compiled(ir.dummy(), tmp_path, cache_dir=tmp_path / "none", **auto)
    assert not (tmp_path / "none").exists()
    compiled(ir.dummy(), tmp_path, cache_dir=tmp_path / "some", allow_cache=True, **auto)
    compiled(ir.dummy(), tmp_path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir())
    assert list((tmp_path / "some").iterdir())


def test_runtime_info_is_in_the_metadata(tmp_path: Path) -> None:
    model = ir.dummy()
    model.set_rt_info("Classification", ["model_info", "model_type"])
    model.set_rt_info([1, 2], ["model_info", "numbers"])
    info = compiled(model, tmp_path).signature.extra["rt_info"]["model_info"]
    assert info == {"model_type": "Classification", "numbers": "1 2"}


@pytest.mark.parametrize(
    ("name", "size", "text"), [("model.bin", 10, "Incorrect weights"), ("model.xml", 300, "mismatch")]
)
def test_truncated_files_are_refused_with_the_reason_of_openvino(
    name: str, size: int, text: str, tmp_path: Path
) -> None:
    base_path = ir.save(ir.slow(8, 1), tmp_path, "model")
    os.truncate(base_path / "1" / name, size)
    with pytest.raises(ConfigError, match=text) as caught:
        compile_model(ModelFile(base_path / "1" / "model.xml", ModelSpec(name="model", base_path=base_path)))
    assert "model.xml" in str(caught.value)
    assert ".cpp" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".onnx", ".pb", ".tflite", ".pdmodel"])
def test_files_of_garbage_are_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(np.random.default_rng(0).bytes(2000))
    file.with_suffix(".pdiparams").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"OpenVINO cannot read the model|not a Paddle program"):
        compile_model(ModelFile(file, ModelSpec(name="model", base_path=tmp_path)))


@pytest.mark.parametrize(
    ("rows", "setting", "expected"),
    [(-1, {}, "256"), (-1, {"CPU_RUNTIME_CACHE_CAPACITY": "7"}, "7"), (1, {}, None)],
    ids=["open shapes", "as the user says", "one shape"],
)
def test_openvino_caches_a_bounded_number_of_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, setting: dict[str, str], expected: str | None
) -> None:
    configs: list[dict[str, str]] = []

    class _Spying:
        def compile_model(self, model: ov.Model, device: str, config: dict[str, str]) -> ov.CompiledModel:
            configs.append(config)
            return core().compile_model(model, device, config)

    monkeypatch.setattr("ovmstrio.inference.compile.core", _Spying)
    model = ir.dummy()
    model.reshape([rows, 10])
    compiled(model, tmp_path, plugin_config=setting)
    assert {config.get("CPU_RUNTIME_CACHE_CAPACITY") for config in configs} == {expected}
