"""Sessions and inference nodes over real models, served by the registry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.datatypes import BY_NAME, BYTES
from ovmstrio.core.errors import ConfigError, FailedPrecondition, GraphFailure
from ovmstrio.registry import Registry
from ovmstrio.runtimes.graphs.calculator import ContractError
from ovmstrio.runtimes.graphs.calculators import find_kind
from ovmstrio.runtimes.graphs.calculators.session import Session
from ovmstrio.runtimes.graphs.config.graph_config import NodeConfig, Port
from ovmstrio.runtimes.graphs.packets import MediaPipeTensor, OvTensor, Packet, TfTensor
from ovmstrio.runtimes.models.load_model import load_model
from pyovms import Tensor
from tests.support import ir
from tests.support.graph_nodes import options, refs, run_nodes
from tests.support.servables import EXACT, raw_request
from tests.support.stub_registry import registry_of, running

MISSING = (
    "Mediapipe graph precondition failed - FAILED_PRECONDITION: CalculatorGraph::Run() failed: \n"
    'Calculator::Open() for node "session" failed: OpenVINOModelServerSessionCalculator failed to load the model "m"'
)


def spec(base: Path) -> ModelSpec:
    """Say how the model ``m`` is served."""
    return ModelSpec(name="m", base_path=base, plugin_config=dict(EXACT))


@asynccontextmanager
async def serving(model: ov.Model, tmp_path: Path) -> AsyncIterator[Registry]:
    """Serve a model as ``m`` while the block lasts."""
    async with running(registry_of(load_model, poll_seconds=0)) as registry:
        result = await registry.apply([spec(ir.save(model, tmp_path, "m"))])
        assert result.failures == ()
        yield registry


def session(name: str = "m", version: str = "", **more: Any) -> NodeConfig:
    """Make a session node."""
    made = options("OpenVINOModelServerSessionCalculatorOptions", servable_name=name, servable_version=version)
    settings: dict[str, Any] = {"side_outputs": refs("SESSION:session"), "node_options": (made,)}
    return NodeConfig("", "session", "OpenVINOModelServerSessionCalculator", **(settings | more))


def inference(inputs: list[str], outputs: list[str], **values: Any) -> NodeConfig:
    """Make an inference node; the names of tensors are given as options."""
    fields: dict[str, Any] = {
        "tag_to_input_tensor_names": {},
        "tag_to_output_tensor_names": {},
        "input_order_list": [],
        "output_order_list": [],
    }
    made = (options("OpenVINOInferenceCalculatorOptions", **(fields | values)),) if values else ()
    return NodeConfig(
        "",
        "inference",
        "OpenVINOInferenceCalculator",
        refs(*inputs),
        refs(*outputs),
        refs("SESSION:session"),
        node_options=made,
    )


def fp32(*values: float, kind: type[Any] = OvTensor) -> Any:
    """Make a tensor of shape [1, n]."""
    return kind(BY_NAME["FP32"], np.array([values], np.float32))


def shown(packets: list[Packet]) -> list[tuple[int, Any]]:
    """Give timestamps and values."""
    return [(packet.timestamp, packet.value.array.tolist()) for packet in packets]


async def test_a_model_answers_at_the_time_of_its_inputs(tmp_path: Path) -> None:
    """Tags are tensor names where nothing else is said, with an upper-case model as with any."""
    model = ir.passthrough("FP32", (1, 2), input_name="IN", output_name="OUT")
    async with serving(model, tmp_path) as registry:
        packets = await run_nodes(
            [inference(["IN:x"], ["OUT:y"]), session()],
            [(5, {"x": fp32(1, 2)}), (7, {"x": fp32(3, 4)})],
            lease=registry.lease,
        )
    assert shown(packets["y"]) == [(5, [[1, 2]]), (7, [[3, 4]])]
    assert isinstance(packets["y"][0].value, OvTensor)


@pytest.mark.parametrize(
    ("prefix", "kind"), [("OVTENSOR", OvTensor), ("TENSOR", MediaPipeTensor), ("TFTENSOR", TfTensor), ("ANY", OvTensor)]
)
async def test_tags_decide_which_tensors_come_out(tmp_path: Path, prefix: str, kind: type[Any]) -> None:
    """Maps give the names, and the prefix of a tag the class."""
    node = inference(
        [f"{prefix}_1:x", f"{prefix}_2:y"],
        [f"{prefix}_S:s", f"{prefix}_S:1:d"],
        tag_to_input_tensor_names={f"{prefix}_1": "x", f"{prefix}_2": "y"},
        tag_to_output_tensor_names={f"{prefix}_S": "sum", f"{prefix}_S:1": "difference"},
    )
    async with serving(ir.sum_of_two((1, 2)), tmp_path) as registry:
        packets = await run_nodes(
            [session(), node], [(1, {"x": fp32(5, 6, kind=kind), "y": fp32(1, 2, kind=kind)})], lease=registry.lease
        )
    assert shown(packets["s"]) == [(1, [[6, 8]])]
    assert shown(packets["d"]) == [(1, [[4, 4]])]
    assert {type(packet.value) for sent in packets.values() for packet in sent} == {kind}


@pytest.mark.parametrize(("tag", "kind"), [("OVTENSORS", OvTensor), ("TENSORS", MediaPipeTensor)])
async def test_tuples_of_tensors_go_by_order(tmp_path: Path, tag: str, kind: type[Any]) -> None:
    """One stream carries all tensors, in the order that the options list."""
    node = inference(
        [f"{tag}:xy"], [f"{tag}:out"], input_order_list=["y", "x"], output_order_list=["sum", "difference"]
    )
    value = (fp32(1, kind=kind), fp32(5, kind=kind))
    async with serving(ir.sum_of_two((1, 1)), tmp_path) as registry:
        packets = await run_nodes([session(), node], [(1, {"xy": value})], lease=registry.lease)
        with pytest.raises(GraphFailure, match="carries 1 tensors, and input_order_list names 2"):
            await run_nodes([session(), node], [(1, {"xy": value[:1]})], lease=registry.lease)
    (made,) = packets["out"]
    assert [(type(each), each.array.tolist()) for each in made.value] == [(kind, [[6]]), (kind, [[4]])]


async def test_inputs_may_come_in_any_memory_order(tmp_path: Path) -> None:
    """An array that is not contiguous reaches the model as its elements are."""
    tensor = OvTensor(BY_NAME["FP32"], np.arange(6, dtype=np.float32).reshape(3, 2).T)
    node = inference(
        ["OVTENSOR:in"],
        ["OVTENSOR:out"],
        tag_to_input_tensor_names={"OVTENSOR": "x"},
        tag_to_output_tensor_names={"OVTENSOR": "y"},
    )
    async with serving(ir.passthrough("FP32", (2, 3)), tmp_path) as registry:
        packets = await run_nodes([session(), node], [(1, {"in": tensor})], lease=registry.lease)
    assert shown(packets["out"]) == [(1, [[0, 2, 4], [1, 3, 5]])]


async def test_strings_reach_models_that_take_them(tmp_path: Path) -> None:
    """Object arrays of bytes are framed for the model and come back as such."""
    strings = np.array([b"a", b"", b"long"], object)
    async with serving(ir.string_passthrough(), tmp_path) as registry:
        packets = await run_nodes(
            [session(), inference(["strings"], ["X:strings_out"], tag_to_output_tensor_names={"X": "strings"})],
            [(1, {"strings": OvTensor(BYTES, strings)})],
            lease=registry.lease,
        )
    assert shown(packets["strings_out"]) == [(1, [b"a", b"", b"long"])]


async def test_converters_stand_between_models_and_python(tmp_path: Path) -> None:
    """A model gets what was a Python tensor and gives what becomes one."""
    names = options("PyTensorOvTensorConverterCalculatorOptions", tag_to_output_tensor_names={"OVMS_PY_TENSOR": "r"})
    converter = "PyTensorOvTensorConverterCalculator"
    nodes = [
        NodeConfig("", "in", converter, refs("OVMS_PY_TENSOR:x"), refs("OVTENSOR:ov_x")),
        inference(["B:ov_x"], ["A:ov_y"], tag_to_input_tensor_names={"B": "b"}, tag_to_output_tensor_names={"A": "a"}),
        NodeConfig("", "out", converter, refs("OVTENSOR:ov_y"), refs("OVMS_PY_TENSOR:y"), node_options=(names,)),
        session(),
    ]
    async with serving(ir.dummy((1, 3)), tmp_path) as registry:
        feed = [(1, {"x": Tensor("x", np.arange(3, dtype=np.float32).reshape(1, 3))})]
        ((packet,),) = (await run_nodes(nodes, feed, lease=registry.lease)).values()
    assert (packet.value.name, packet.value.datatype) == ("r", "FP32")
    assert np.array(packet.value).tolist() == [[1, 2, 3]]


# What goes wrong


async def test_a_model_that_is_not_there_is_a_failed_precondition(tmp_path: Path) -> None:
    """The run does not start while the model is unknown, retired or of another version."""
    async with running(registry_of(load_model, poll_seconds=0)) as registry:
        nodes = [session(), inference(["b"], ["A:y"])]
        with pytest.raises(FailedPrecondition) as caught:
            await run_nodes(nodes, [(1, {"b": fp32(1)})], lease=registry.lease)
        assert caught.value.message.startswith(f"{MISSING}: ")
        await registry.apply([spec(ir.save(ir.dummy(), tmp_path, "m"))])
        with pytest.raises(FailedPrecondition, match='node "session" failed'):
            await run_nodes([session(version="2"), nodes[1]], [(1, {"b": fp32(1)})], lease=registry.lease)


@pytest.mark.parametrize("version", ["", "0", "1", "latest"])
async def test_versions_are_found_as_in_requests(tmp_path: Path, version: str) -> None:
    """No number means the default version."""
    node = inference(["X:x"], ["Y:y"], tag_to_input_tensor_names={"X": "x"}, tag_to_output_tensor_names={"Y": "y"})
    async with serving(ir.passthrough("FP32", (1, 1)), tmp_path) as registry:
        packets = await run_nodes([session(version=version), node], [(1, {"x": fp32(4)})], lease=registry.lease)
    assert shown(packets["y"]) == [(1, [[4]])]


async def test_a_session_calls_what_is_served_now(tmp_path: Path) -> None:
    """A session that was opened before a reload answers with the new version, and fails when the model is gone."""
    async with serving(ir.passthrough("FP32", (1, 1)), tmp_path) as registry:
        opened = Session(registry.lease, "m", "", "session")
        await opened.check()
        request = raw_request({"x": np.ones((1, 1), np.float32)})
        assert (await opened.infer(request)).model_version == "1"
        ir.save(ir.passthrough("FP32", (1, 1)), tmp_path, "m", version=2)
        assert (await registry.rescan()).changed
        assert (await opened.infer(request)).model_version == "2"
        await registry.apply([])
        with pytest.raises(FailedPrecondition, match=r"Calculator::Process\(\) for node \"session\" failed"):
            await opened.infer(request)


async def test_a_model_that_refuses_fails_the_node(tmp_path: Path) -> None:
    """The client is told what the model said, and of which servable it was."""
    node = inference(["B:x"], ["A:y"], tag_to_input_tensor_names={"B": "b"}, tag_to_output_tensor_names={"A": "a"})
    async with serving(ir.dummy((1, 3)), tmp_path) as registry:
        with pytest.raises(GraphFailure) as caught:
            await run_nodes([session(), node], [(1, {"x": fp32(1)})], lease=registry.lease)
    assert caught.value.message.startswith(
        "Mediapipe execution failed. MP status - INTERNAL: CalculatorGraph::Run() failed: \n"
        'Calculator::Process() for node "inference" failed: servable "m": Invalid input shape - Expected: (1,3); Actual'
    )


async def test_an_input_that_never_comes_fails_the_node(tmp_path: Path) -> None:
    """A set of inputs that is incomplete at the end of the stream cannot be answered."""
    async with serving(ir.sum_of_two((1, 1)), tmp_path) as registry:
        with pytest.raises(GraphFailure, match="input :1 is missing at timestamp 1"):
            await run_nodes(
                [session(), inference(["x", "y"], ["sum"])],
                [(1, {"x": fp32(1)})],
                lease=registry.lease,
                inputs=["y"],
            )


async def test_outputs_that_do_not_fit_fail_the_node(tmp_path: Path) -> None:
    """An output that the model does not give, or that its tag cannot carry, is named."""
    feed = [(1, {"x": OvTensor(BY_NAME["INT64"], np.ones((1, 1), np.int64))})]
    async with serving(ir.passthrough("INT64", (1, 1)), tmp_path) as registry:
        with pytest.raises(GraphFailure, match='servable "m" gives no output "Z" for Z; it gives: y'):
            await run_nodes([session(), inference(["x"], ["Z:z"])], feed, lease=registry.lease)
        node = inference(["x"], ["TENSOR:z"], tag_to_output_tensor_names={"TENSOR": "y"})
        with pytest.raises(GraphFailure, match='output "y" is INT64, and TENSOR can carry BOOL, FP16, FP32'):
            await run_nodes([session(), node], feed, lease=registry.lease)


@pytest.mark.parametrize(
    "node",
    [
        session(name=""),
        session(node_options=()),
        session(side_outputs=refs("OTHER:s")),
        session(side_outputs=()),
        session(inputs=refs("a")),
        inference([], ["y"]),
        inference(["x"], []),
        inference(["TFLITE_TENSOR:x"], ["y"]),
        inference(["OVTENSORS:x"], ["y"]),
        inference(["x"], ["y"], input_order_list=["a"]),
        inference(["OVTENSORS:x", "OVTENSORS:1:z"], ["y"], input_order_list=["a"]),
        inference(["OVTENSORS:x"], ["y"], input_order_list=["a"], tag_to_input_tensor_names={"OVTENSORS": "a"}),
        NodeConfig("", "i", "OpenVINOInferenceCalculator", refs("x"), refs("y")),
        NodeConfig("", "i", "OpenVINOInferenceCalculator", refs("x"), refs("y"), refs("OTHER:session")),
    ],
)
def test_nodes_that_cannot_be(node: NodeConfig) -> None:
    """What is missing or contradicts itself is found before anything runs."""
    kind = find_kind(node.calculator)
    assert kind is not None
    with pytest.raises(ContractError):
        kind.contract(node)


async def test_a_graph_does_not_call_itself() -> None:
    """A session with the graph's own name would never end."""
    with pytest.raises(ConfigError, match="graph 'graph' would call itself"):
        await run_nodes([session(name="graph")], [])


def test_the_contract_types_streams_by_prefix() -> None:
    """Wiring is checked against what each tag carries."""
    kind = find_kind("OpenVINOInferenceCalculator")
    assert kind is not None
    made = kind.contract(inference(["TENSOR_A:a", "TFTENSOR:b", "c"], ["OVTENSORS:y"], output_order_list=["y"]))
    assert list(made.inputs.values()) == [OvTensor, MediaPipeTensor, TfTensor]
    assert made.outputs == {Port("OVTENSORS", 0): tuple}
    assert made.propagates_bounds
