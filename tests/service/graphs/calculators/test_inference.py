from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import outcome
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError, FailedPrecondition, GraphFailure
from ovmstrio.core.tensor import BY_NAME, BYTES
from ovmstrio.graphs.calculator import ContractError
from ovmstrio.graphs.calculators.inference import Session
from ovmstrio.graphs.graph_config import NodeConfig, Port
from ovmstrio.graphs.packets import MediaPipeTensor, OvTensor, Packet, TfTensor
from ovmstrio.models.loading import load_model
from ovmstrio.serving.registry import Registry
from tests.support import ir
from tests.support.graph_nodes import contract_of, options, refs, run_nodes
from tests.support.servables import EXACT, raw_request
from tests.support.stub_registry import registry_of, running

Packets = dict[str, list[Packet]]
MISSING = (
    "Mediapipe graph precondition failed - FAILED_PRECONDITION: CalculatorGraph::Run() failed: \n"
    'Calculator::Open() for node "session" failed: OpenVINOModelServerSessionCalculator failed to load the model "m"'
)


def model_spec(base: Path) -> ModelSpec:
    return ModelSpec(name="m", base_path=base, plugin_config=dict(EXACT))


@asynccontextmanager
async def serving(model: ov.Model, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(registry_of(load_model, poll_seconds=0)) as registry:
        result = await registry.apply([model_spec(ir.save(model, tmp_path, "m"))])
        assert result.failures == ()
        yield registry


def session(name: str = "m", version: str = "", **more: Any) -> NodeConfig:
    made = options("OpenVINOModelServerSessionCalculatorOptions", servable_name=name, servable_version=version)
    settings: dict[str, Any] = {"side_outputs": refs("SESSION:session"), "node_options": (made,)}
    return NodeConfig("", "session", "OpenVINOModelServerSessionCalculator", **(settings | more))


def inference(inputs: list[str], outputs: list[str], **values: Any) -> NodeConfig:
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


async def run(model: ov.Model, tmp_path: Path, node: NodeConfig, *values: dict[str, Any], **more: Any) -> Packets:
    nodes, feed = [node, session(**more)], list(enumerate(values, 1))
    async with serving(model, tmp_path) as registry:
        result = await outcome.acapture(partial(run_nodes, nodes, feed, lease=registry.lease))
    return result.unwrap()


def fp32(*values: float, kind: type[Any] = OvTensor) -> Any:
    return kind(BY_NAME["FP32"], np.array([values], np.float32))


X_TO_Y = inference(["X:in"], ["Y:out"], tag_to_input_tensor_names={"X": "x"}, tag_to_output_tensor_names={"Y": "y"})


def values_of(packets: list[Packet]) -> list[tuple[int, Any]]:
    return [(packet.timestamp, packet.value.array.tolist()) for packet in packets]


async def test_outputs_have_the_timestamps_of_inputs(tmp_path: Path) -> None:
    model = ir.passthrough("FP32", (1, 2), input_name="IN", output_name="OUT")
    packets = await run(model, tmp_path, inference(["IN:x"], ["OUT:y"]), {"x": fp32(1, 2)}, {"x": fp32(3, 4)})
    assert values_of(packets["y"]) == [(1, [[1, 2]]), (2, [[3, 4]])]
    assert isinstance(packets["y"][0].value, OvTensor)


@pytest.mark.parametrize(
    ("prefix", "kind"), [("OVTENSOR", OvTensor), ("TENSOR", MediaPipeTensor), ("TFTENSOR", TfTensor), ("ANY", OvTensor)]
)
async def test_tags_decide_the_types_of_tensors(tmp_path: Path, prefix: str, kind: type[Any]) -> None:
    node = inference(
        [f"{prefix}_1:x", f"{prefix}_2:y"],
        [f"{prefix}_S:s", f"{prefix}_S:1:d"],
        tag_to_input_tensor_names={f"{prefix}_1": "x", f"{prefix}_2": "y"},
        tag_to_output_tensor_names={f"{prefix}_S": "sum", f"{prefix}_S:1": "difference"},
    )
    values = {"x": fp32(5, 6, kind=kind), "y": fp32(1, 2, kind=kind)}
    packets = await run(ir.sum_of_two((1, 2)), tmp_path, node, values)
    assert values_of(packets["s"]) == [(1, [[6, 8]])]
    assert values_of(packets["d"]) == [(1, [[4, 4]])]
    assert {type(packet.value) for sent in packets.values() for packet in sent} == {kind}


@pytest.mark.parametrize(("tag", "kind"), [("OVTENSORS", OvTensor), ("TENSORS", MediaPipeTensor)])
async def test_tuples_of_tensors_have_an_order(tmp_path: Path, tag: str, kind: type[Any]) -> None:
    node = inference(
        [f"{tag}:xy"], [f"{tag}:out"], input_order_list=["y", "x"], output_order_list=["sum", "difference"]
    )
    value = (fp32(1, kind=kind), fp32(5, kind=kind))
    packets = await run(ir.sum_of_two((1, 1)), tmp_path, node, {"xy": value})
    with pytest.raises(GraphFailure, match=r"carries 1 tensors, expected 2 \(input_order_list\)"):
        await run(ir.sum_of_two((1, 1)), tmp_path, node, {"xy": value[:1]})
    (made,) = packets["out"]
    assert [(type(each), each.array.tolist()) for each in made.value] == [(kind, [[6]]), (kind, [[4]])]


async def test_inputs_have_any_memory_order(tmp_path: Path) -> None:
    tensor = OvTensor(BY_NAME["FP32"], np.arange(6, dtype=np.float32).reshape(3, 2).T)
    packets = await run(ir.passthrough("FP32", (2, 3)), tmp_path, X_TO_Y, {"in": tensor})
    assert values_of(packets["out"]) == [(1, [[0, 2, 4], [1, 3, 5]])]


async def test_strings_pass(tmp_path: Path) -> None:
    strings = np.array([b"a", b"", b"long"], object)
    node = inference(["strings"], ["X:strings_out"], tag_to_output_tensor_names={"X": "strings"})
    packets = await run(ir.string_passthrough(), tmp_path, node, {"strings": OvTensor(BYTES, strings)})
    assert values_of(packets["strings_out"]) == [(1, [b"a", b"", b"long"])]


# What goes wrong


async def test_missing_model_is_a_failed_precondition(tmp_path: Path) -> None:
    async with running(registry_of(load_model, poll_seconds=0)) as registry:
        nodes = [session(), inference(["b"], ["A:y"])]
        with pytest.raises(FailedPrecondition) as caught:
            await run_nodes(nodes, [(1, {"b": fp32(1)})], lease=registry.lease)
        assert caught.value.message.startswith(f"{MISSING}: ")
        await registry.apply([model_spec(ir.save(ir.dummy(), tmp_path, "m"))])
        with pytest.raises(FailedPrecondition, match='node "session" failed'):
            await run_nodes([session(version="2"), nodes[1]], [(1, {"b": fp32(1)})], lease=registry.lease)


@pytest.mark.parametrize("version", ["", "0", "1", "latest"])
async def test_version_is_optional(tmp_path: Path, version: str) -> None:
    packets = await run(ir.passthrough("FP32", (1, 1)), tmp_path, X_TO_Y, {"in": fp32(4)}, version=version)
    assert values_of(packets["out"]) == [(1, [[4]])]


async def test_session_follows_reloads(tmp_path: Path) -> None:
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


async def test_refusal_of_the_model_fails_the_node(tmp_path: Path) -> None:
    node = inference(["B:x"], ["A:y"], tag_to_input_tensor_names={"B": "b"}, tag_to_output_tensor_names={"A": "a"})
    with pytest.raises(GraphFailure) as caught:
        await run(ir.dummy((1, 3)), tmp_path, node, {"x": fp32(1)})
    assert caught.value.message.startswith(
        "Mediapipe execution failed. MP status - INTERNAL: CalculatorGraph::Run() failed: \n"
        'Calculator::Process() for node "inference" failed: servable "m": Invalid input shape - Expected: (1,3); Actual'
    )


async def test_missing_input_fails_the_node(tmp_path: Path) -> None:
    with pytest.raises(GraphFailure, match="input :1 is missing at timestamp 1"):
        await run(ir.sum_of_two((1, 1)), tmp_path, inference(["x", "y"], ["sum"]), {"x": fp32(1)}, {"y": fp32(1)})


async def test_invalid_outputs_fail_the_node(tmp_path: Path) -> None:
    value = {"x": OvTensor(BY_NAME["INT64"], np.ones((1, 1), np.int64))}
    node = inference(["x"], ["TENSOR:z"], tag_to_output_tensor_names={"TENSOR": "y"})
    for invalid, text in (
        (inference(["x"], ["Z:z"]), 'servable "m" has no output "Z" for Z; known: y'),
        (node, 'output "y" is INT64, but TENSOR carries BOOL, FP16, FP32'),
    ):
        with pytest.raises(GraphFailure, match=text):
            await run(ir.passthrough("INT64", (1, 1)), tmp_path, invalid, value)


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
def test_invalid_nodes_are_refused(node: NodeConfig) -> None:
    with pytest.raises(ContractError):
        contract_of(node)


async def test_graph_does_not_call_itself() -> None:
    with pytest.raises(ConfigError, match="graph 'graph' would call itself"):
        await run_nodes([session(name="graph")], [])


def test_prefixes_are_the_types_of_streams() -> None:
    made = contract_of(inference(["TENSOR_A:a", "TFTENSOR:b", "c"], ["OVTENSORS:y"], output_order_list=["y"]))
    assert list(made.inputs.values()) == [OvTensor, MediaPipeTensor, TfTensor]
    assert made.outputs == {Port("OVTENSORS", 0): tuple}
    assert made.propagates_bounds
