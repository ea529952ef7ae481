from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.mapping import TensorMapping
from ovmstrio.config.specs import BatchSpec, LayoutSpec, ModelSpec, ShapeSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import ANY_SIZE, Dim
from ovmstrio.openvino import compile as compile_module
from ovmstrio.openvino.compile import ModelFile, compile_model
from ovmstrio.openvino.compiled import Compiled
from ovmstrio.openvino.first_runs import Timing
from ovmstrio.openvino.network import Network
from ovmstrio.openvino.runtime import core, devices, reason
from tests.support import ir
from tests.support.servables import EXACT

pytestmark = pytest.mark.compiles

FIXED = Dim.fixed


def compiled(model: ov.Model, repository: Path, mapping: TensorMapping | None = None, **settings: Any) -> Compiled:
    """Save a model and compile it with settings."""
    base_path = ir.save(model, repository, "model")
    settings["plugin_config"] = {**EXACT, **settings.get("plugin_config", {})}
    spec = ModelSpec(name="model", base_path=base_path, origin="config.json", **settings)
    return compile_model(ModelFile(base_path / "1" / "model.xml", spec, mapping or TensorMapping()))


def _several(model: ov.Model, repository: Path, hint: dict[str, str]) -> Iterator[Compiled]:
    for _ in range(8):
        yield compiled(model, repository, plugin_config=hint)


def test_core_is_one_and_knows_the_processor() -> None:
    """There is one core, and it can use the CPU."""
    assert core() is core()
    assert "CPU" in devices()


def test_signature_is_sorted_by_name(tmp_path: Path) -> None:
    """Inputs and outputs come in the order of their names, each with its own port."""
    signature = compiled(ir.sum_of_two(), tmp_path).signature
    assert [spec.name for spec in signature.inputs] == ["x", "y"]
    assert [spec.name for spec in signature.outputs] == ["difference", "sum"]
    assert signature.output_ports == (1, 0)
    assert signature.inputs[0].shape == (FIXED(1), FIXED(10))


@pytest.mark.parametrize("datatype", list(ir.TYPES))
def test_every_datatype_is_reported(datatype: str, tmp_path: Path) -> None:
    """Each of KServe's datatypes is recognised on inputs and outputs."""
    model = ir.string_passthrough() if datatype == "BYTES" else ir.passthrough(datatype)
    signature = compiled(model, tmp_path).signature
    assert [spec.datatype.name for spec in (*signature.inputs, *signature.outputs)] == [datatype, datatype]


def test_aliases_replace_names(tmp_path: Path) -> None:
    """With a mapping, tensors are known by their aliases only, and sorted by them."""
    mapping = TensorMapping({"x": "zeta", "y": "alpha"}, {"sum": "total"})
    signature = compiled(ir.sum_of_two(), tmp_path, mapping).signature
    assert [spec.name for spec in signature.inputs] == ["alpha", "zeta"]
    assert signature.input_ports == (1, 0)
    assert [spec.name for spec in signature.outputs] == ["difference", "total"]


def test_settings_use_aliases_only(tmp_path: Path) -> None:
    """A real name that has an alias is refused in `shape`, naming the alias."""
    mapping = TensorMapping({"b": "data"})
    shape = {"b": ShapeSpec(dims=(FIXED(2), FIXED(10)))}
    with pytest.raises(ConfigError, match=r"mapping_config.json replaces.*'data'"):
        compiled(ir.dummy(), tmp_path, mapping, shapes=shape)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shapes": {"bb": ShapeSpec(dims=(FIXED(2),))}}, "did you mean 'b'"),
        ({"layouts": {"c": LayoutSpec(tensor="NC")}}, "layout names a tensor that the model does not have"),
        (
            {
                "shapes": {"b": ShapeSpec(dims=(FIXED(1), FIXED(2), FIXED(3), FIXED(4)))},
                "layouts": {"": LayoutSpec(tensor="NHWC")},
            },
            "layout",
        ),
        ({"mean": (1.0,)}, "mean needs a layout"),
        ({"precisions": {"": "FLOAT"}}, "unknown precision 'FLOAT'"),
        ({"color_formats": {"": "PINK"}, "layouts": {"": LayoutSpec(tensor="NC")}}, "unknown color_format 'PINK'"),
        ({"plugin_config": {"NUM_STREAMZ": "1"}}, "did you mean NUM_STREAMS"),
        ({"plugin_config": {"PERFORMANCE_HINT": "FAST"}}, "Cannot compile model into target device.*FAST"),
        ({"target_device": "TOASTER"}, "devices here: .*CPU"),
    ],
)
def test_settings_that_do_not_fit_are_explained(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Each setting that cannot be used says which one it is and what would do."""
    with pytest.raises(ConfigError, match=text):
        compiled(ir.dummy(), tmp_path, **settings)


def test_setting_without_a_name_needs_a_single_input(tmp_path: Path) -> None:
    """A shape without a tensor name is refused where it could mean several inputs."""
    with pytest.raises(ConfigError, match="without a tensor name, but the model has 2: x, y"):
        compiled(ir.sum_of_two(), tmp_path, shapes={"": ShapeSpec(dims=(FIXED(1), FIXED(5)))})


def test_shape_is_applied(tmp_path: Path) -> None:
    """Fixed, ranged and open dimensions of `shape` become the model's."""
    dims = (Dim(1, 4), ANY_SIZE)
    signature = compiled(ir.dummy(), tmp_path, shapes={"": ShapeSpec(dims=dims)}).signature
    assert signature.inputs[0].shape == dims
    assert signature.inputs[0].reported_shape == [-1, -1]
    assert not signature.has_fixed_inputs


@pytest.mark.parametrize("dim", [FIXED(8), ANY_SIZE, Dim(2, 8)])
def test_batch_size_goes_to_the_batch_dimension(dim: Dim, tmp_path: Path) -> None:
    """`batch_size` sets the dimension that the layout calls N, of every input."""
    signature = compiled(ir.sum_of_two(), tmp_path, batch=BatchSpec(dim=dim)).signature
    assert [spec.shape for spec in signature.inputs] == [(dim, FIXED(10))] * 2


def test_batch_size_follows_the_layout(tmp_path: Path) -> None:
    """The batch dimension is where N stands, not always the first."""
    settings: dict[str, Any] = {"batch": BatchSpec(dim=FIXED(7)), "layouts": {"": LayoutSpec(tensor="CN")}}
    tensor = compiled(ir.dummy(), tmp_path, **settings).signature.inputs[0]
    assert tensor.shape == (FIXED(1), FIXED(7))
    assert tensor.batch_axis == 1


def test_batch_size_without_batch_dimension_is_refused(tmp_path: Path) -> None:
    """A batch size for a model whose layout has no N is an error."""
    settings: dict[str, Any] = {"batch": BatchSpec(dim=FIXED(7)), "layouts": {"": LayoutSpec(tensor="HW")}}
    with pytest.raises(ConfigError, match="no input of 'model' has a batch dimension"):
        compiled(ir.dummy(), tmp_path, **settings)


def test_impossible_shape_is_refused(tmp_path: Path) -> None:
    """A shape that the model's operations cannot take is refused with OpenVINO's reason."""
    shapes = {"x": ShapeSpec(dims=(FIXED(1), FIXED(3))), "y": ShapeSpec(dims=(FIXED(1), FIXED(4)))}
    with pytest.raises(ConfigError, match=r"cannot take the shapes x: \(1,3\), y: \(1,4\)"):
        compiled(ir.sum_of_two(), tmp_path, shapes=shapes)


async def test_layout_change_adds_a_transpose(tmp_path: Path) -> None:
    """`NHWC:NCHW` shows the caller channels last and gives the model channels first."""
    model = ir.passthrough("FP32", (1, 3, 2, 4), input_name="image", output_name="pixels")
    made = compiled(model, tmp_path, layouts={"image": LayoutSpec(tensor="NHWC", model="NCHW")})
    assert made.signature.inputs[0].reported_shape == [1, 2, 4, 3]
    assert made.signature.inputs[0].layout == "NHWC"
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 4, 3)
    np.testing.assert_array_equal((await Network(made).infer([x]))[0], x.transpose(0, 3, 1, 2))


async def test_layout_alone_only_declares(tmp_path: Path) -> None:
    """A layout without a second one moves no data."""
    model = ir.passthrough("FP32", (1, 2, 4, 3), input_name="image", output_name="pixels")
    made = compiled(model, tmp_path, layouts={"image": LayoutSpec(tensor="NHWC"), "pixels": LayoutSpec(tensor="NHWC")})
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 4, 3)
    np.testing.assert_array_equal((await Network(made).infer([x]))[0], x)
    assert made.signature.outputs[0].layout == "NHWC"


async def test_precision_mean_scale_and_colours(tmp_path: Path) -> None:
    """Bytes in BGR are turned into normalised floats in RGB before the model sees them."""
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


def test_small_models_run_inline_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of microseconds is compiled for one thread and stays on the event loop."""
    monkeypatch.setattr(compile_module, "warm_up", lambda *_: Timing(2e-6, 1e-6, 40))
    made = compiled(ir.dummy(), tmp_path)
    assert made.model.get_property("INFERENCE_NUM_THREADS") == 1
    assert made.placement.is_inline(40)
    assert made.timing is not None
    assert made.timing.input_bytes == 40


@pytest.mark.parametrize("model", [ir.dummy(), ir.dummy([-1, 10])])
@pytest.mark.parametrize(
    ("hint", "threads", "streams"), [({}, 1, 1), ({"PERFORMANCE_HINT": "LATENCY"}, 1, 1), ({"NUM_STREAMS": "2"}, 2, 2)]
)
def test_small_models_never_keep_two_cores_busy(
    model: ov.Model, hint: dict[str, str], threads: int, streams: int, tmp_path: Path
) -> None:
    """Whatever their shapes, and where the user asks for low latency, too; streams that the user asks for are made."""
    # It is timed, and others may have the cores at that moment.
    made = next(one for one in _several(model, tmp_path, hint) if one.placement.is_inline(40))
    assert made.streams == streams
    if os.cpu_count() != 1:
        assert made.model.get_property("INFERENCE_NUM_THREADS") == threads


def test_user_settings_win_over_ours(tmp_path: Path) -> None:
    """Threads that the user chose are kept for small models, too."""
    made = compiled(ir.dummy(), tmp_path, plugin_config={"INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "2"})
    assert made.model.get_property("INFERENCE_NUM_THREADS") == 2
    assert made.streams == 2


@pytest.mark.parametrize(("plugin_config", "is_bound"), [({}, False), ({"ENABLE_CPU_PINNING": "YES"}, True)])
def test_the_event_loop_is_bound_to_no_core_while_it_infers(
    plugin_config: dict[str, str], *, is_bound: bool, tmp_path: Path
) -> None:
    """It goes on where a core is free; who asks for bound threads has them."""
    made = next(one for one in _several(ir.dummy(), tmp_path, plugin_config) if one.placement.is_inline(40))
    assert made.model.get_property("ENABLE_CPU_PINNING") is is_bound


def test_slow_models_go_through_the_pool(tmp_path: Path) -> None:
    """A model of many milliseconds is compiled for latency, without our limit of threads, and never runs inline."""
    made = compiled(ir.slow(256, 40), tmp_path)
    assert made.model.get_property("PERFORMANCE_HINT") == "LATENCY"
    assert not made.placement.is_inline(0)


def test_number_of_requests(tmp_path: Path) -> None:
    """Nireq is the number asked for, or twice what runs at once, so that the device never waits for the next one."""
    assert compiled(ir.dummy(), tmp_path, nireq=7).nireq == 7
    made = compiled(ir.dummy(), tmp_path)
    assert made.side_by_side == made.model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
    assert made.nireq == 2 * made.side_by_side


def test_cache_is_written_and_not_for_auto(tmp_path: Path) -> None:
    """The compile cache fills where it is allowed; models that follow requests need `allow_cache`."""
    auto: dict[str, Any] = {"shapes": {"": ShapeSpec(auto=True)}}
    compiled(ir.dummy(), tmp_path, cache_dir=tmp_path / "none", **auto)
    assert not (tmp_path / "none").exists()
    compiled(ir.dummy(), tmp_path, cache_dir=tmp_path / "some", allow_cache=True, **auto)
    compiled(ir.dummy(), tmp_path, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir())
    assert list((tmp_path / "some").iterdir())


def test_runtime_info_is_passed_on(tmp_path: Path) -> None:
    """What the model's file tells of the model goes into the metadata."""
    model = ir.dummy()
    model.set_rt_info("Classification", ["model_info", "model_type"])
    model.set_rt_info([1, 2], ["model_info", "numbers"])
    info = compiled(model, tmp_path).signature.extra["rt_info"]["model_info"]
    assert info == {"model_type": "Classification", "numbers": "1 2"}


def _truncate(directory: Path, name: str, size: int) -> None:
    path = directory / name
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("name", "size", "text"), [("model.bin", 10, "Incorrect weights"), ("model.xml", 300, "mismatch")]
)
def test_truncated_files_are_explained(name: str, size: int, text: str, tmp_path: Path) -> None:
    """A cut file is refused, with its name and OpenVINO's reason without source positions."""
    base_path = ir.save(ir.slow(8, 1), tmp_path, "model")
    _truncate(base_path / "1", name, size)
    with pytest.raises(ConfigError, match=text) as caught:
        compile_model(ModelFile(base_path / "1" / "model.xml", ModelSpec(name="model", base_path=base_path)))
    assert "model.xml" in str(caught.value)
    assert ".cpp" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".onnx", ".pb", ".tflite", ".pdmodel"])
def test_garbage_is_explained(suffix: str, tmp_path: Path) -> None:
    """Random bytes under the name of any framework's file are refused."""
    file = tmp_path / f"model{suffix}"
    file.write_bytes(np.random.default_rng(0).bytes(2000))
    file.with_suffix(".pdiparams").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"OpenVINO cannot read the model|is no Paddle program"):
        compile_model(ModelFile(file, ModelSpec(name="model", base_path=tmp_path)))


def test_unknown_rank_of_an_input_is_refused(tmp_path: Path) -> None:
    """An input must have a number of dimensions, from its file or its configuration."""
    any_rank = ir.dummy(ov.PartialShape.dynamic())
    with pytest.raises(ConfigError, match="no fixed number of dimensions"):
        compiled(any_rank, tmp_path)
    made = compiled(any_rank, tmp_path, shapes={"": ShapeSpec(dims=(FIXED(2), FIXED(3)))})
    assert made.signature.inputs[0].reported_shape == [2, 3]


def test_types_that_no_protocol_carries_are_refused(tmp_path: Path) -> None:
    """A model with four-bit inputs cannot be served, and says so."""
    x = op.parameter([2, 2], ov.Type.u4)
    x.output(0).set_names({"x"})
    with pytest.raises(ConfigError, match="element type u4"):
        compiled(ov.Model([op.result(op.convert(x, "f32"))], [x], "u4"), tmp_path)


def test_reason_drops_source_positions() -> None:
    """OpenVINO's sentence is kept; where in its sources it was thrown is not."""
    text = "Exception from src/core.cpp:84:\nCheck 'a == b' failed at src/x.cpp:1:\nIncorrect weights in bin file!\n\n"
    assert reason(RuntimeError(text)) == "Incorrect weights in bin file!"


@pytest.mark.parametrize(
    ("rows", "asked", "kept"),
    [(-1, {}, "256"), (-1, {"CPU_RUNTIME_CACHE_CAPACITY": "7"}, "7"), (1, {}, None)],
    ids=["open shapes", "as the user says", "one shape"],
)
def test_few_shapes_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, asked: dict[str, str], kept: str | None
) -> None:
    """Requests of ever other shapes would take memory without end; OpenVINO does not tell what it was told."""
    configs: list[dict[str, str]] = []

    class Spying:
        def compile_model(self, model: ov.Model, device: str, config: dict[str, str]) -> ov.CompiledModel:
            configs.append(config)
            return core().compile_model(model, device, config)

    monkeypatch.setattr("ovmstrio.openvino.compile.core", Spying)
    model = ir.dummy()
    model.reshape([rows, 10])
    compiled(model, tmp_path, plugin_config=asked)
    assert {config.get("CPU_RUNTIME_CACHE_CAPACITY") for config in configs} == {kept}
