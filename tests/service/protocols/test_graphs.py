from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.config.specs import GraphSpec
from ovmstrio.graphs.loading import load_graph
from ovmstrio.server.front_ends import GrpcFrontEnd, RestFrontEnd
from ovmstrio.serving.data_plane import DataPlane
from ovmstrio.serving.interfaces import KSERVE_GRPC, TENSORFLOW_GRPC
from tests.service.protocols.kserve.grpc.servers import Caller, payload
from tests.support.api_clients import BothInterfaces, call, with_channel, with_triton
from tests.support.graphs import LOOPBACK, graph_text, python_node
from tests.support.stub_registry import registry_of
from tests.unit.protocols.tensorflow.calls import predict_request, refusal, tensor

HANDLERS = {
    "upper": """
        class OvmsPythonModel:
            def execute(self, inputs):
                text = bytes(inputs[0]).decode()
                if text == "bad":
                    raise ValueError("no such word")
                return [Tensor("out", text.upper().encode())]
        """,
    "words": """
        class OvmsPythonModel:
            def execute(self, inputs):
                for word in bytes(inputs[0]).decode().split():
                    yield [Tensor("out", word.encode())]
                    if word == "bad":
                        raise ValueError("no such word")
        """,
    "custom": """
        class OvmsPythonModel:
            def execute(self, inputs):
                return [Tensor("out", bytes(inputs[0]), shape=[1, 3], datatype="words")]
        """,
    "either": """
        class OvmsPythonModel:
            def execute(self, inputs):
                text = bytes(inputs[0])[4:]
                return [Tensor("word" if text.isalpha() else "number", text)]
        """,
}


async def _infer(both: BothInterfaces, model: str, *texts: str, **more: Any) -> Any:
    given = {"name": "in", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}
    return (await both.request("POST", f"/v2/models/{model}/infer", json={"inputs": [given], **more})).json()


def _write(folder: Path, name: str) -> GraphSpec:
    base = folder / name
    base.mkdir()
    (base / "handler.py").write_text("from pyovms import Tensor\n" + dedent(HANDLERS[name]))
    text = graph_text(python_node("handler.py", more=LOOPBACK if name == "words" else ""))
    if name == "either":
        node = python_node("handler.py", outputs=["WORD:word", "NUMBER:number"])
        text = graph_text(node, outputs=["OVMS_PY_TENSOR_WORD:word", "OVMS_PY_TENSOR_NUMBER:number"])
    (base / "graph.pbtxt").write_text(text)
    return GraphSpec(name=name, base_path=base, graph_path=base / "graph.pbtxt")


@asynccontextmanager
async def _serve(folder: Path) -> AsyncIterator[BothInterfaces]:
    async with trio.open_nursery() as tasks:

        async def load(spec: Any, version: int, directory: Path) -> Any:
            return await load_graph(spec, lease=registry.lease, tasks=tasks)

        registry = registry_of(load, poll_seconds=0)
        plane = DataPlane(registry)
        async with trio.open_nursery() as nursery:
            await nursery.start(registry.run)
            await registry.apply([_write(folder, name) for name in HANDLERS])
            grpc = await nursery.start(GrpcFrontEnd(plane, ["127.0.0.1:0"]).serve)
            rest = await nursery.start(RestFrontEnd(plane, ["127.0.0.1:0"]).serve)
            plane.begin_serving()
            yield BothInterfaces(plane, grpc[0], rest[0])
            nursery.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[BothInterfaces]:
    async with _serve(tmp_path) as served:
        yield served


async def _generate(both: BothInterfaces, model: str, text: str) -> tuple[int, dict[str, Any]]:
    answer = await both.request("POST", f"/v2/models/{model}/generate", json={"in": text})
    return answer.status_code, answer.json()


async def test_invalid_requests_leave_the_stream_of_a_graph_open(both: BothInterfaces) -> None:
    def work(channel: Any) -> Any:
        caller = Caller(channel)
        seen = []
        for request in (
            payload(model="upper", name="in", data=b"a"),
            payload(model="other", name="in", data=b"b"),
            payload(model="upper", name="x", data=b"c"),
            payload(model="upper", name="in", data=b"d"),
        ):
            caller.send(request)
            seen.append(caller.next())
        caller.end()
        return seen, caller.finish()

    (first, wrong, unknown, last), end = await with_channel(both.grpc, work)
    assert [bytes(each.infer_response.raw_output_contents[0]) for each in (first, last)] == [b"A", b"D"]
    wrong_name = "Subsequent request with incorrect servable name; validate subsequent requests"
    assert wrong.error_message == wrong_name
    assert "x is unexpected" in unknown.error_message
    assert (end[0], end[1]) == ([], "OK")


async def test_graphs_answer_in_json(both: BothInterfaces) -> None:
    parameters = {"OVMS_MP_TIMESTAMP": 2**40}
    answer = await _infer(both, "custom", "ab", id="7", parameters=parameters)
    assert "cannot be written as JSON" in answer["error"]
    answer = await _infer(both, "upper", "ab", id="7", parameters=parameters)
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("upper", "1", "7")
    assert answer["parameters"] == {"OVMS_MP_TIMESTAMP": 2**40}
    (output,) = answer["outputs"]
    assert (output["name"], bytes(output["data"])) == ("out", b"\x02\0\0\0AB")


async def test_graphs_answer_with_binary_tensors(both: BothInterfaces) -> None:
    given = {"name": "in", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 2}}
    head = json.dumps({"inputs": [given], "outputs": [{"name": "out", "parameters": {"binary_data": True}}]}).encode()
    answer = await both.request(
        "POST",
        "/v2/models/custom/versions/1/infer",
        content=head + b"\xff\x00",
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    at = int(answer.headers["Inference-Header-Content-Length"])
    output = json.loads(answer.content[:at])["outputs"][0]
    assert (output["datatype"], output["shape"], answer.content[at:]) == ("words", [1, 3], b"\xff\x00")


async def test_the_http_client_of_triton_reads_outputs_of_python_nodes(both: BothInterfaces) -> None:
    def work(client: Any, module: Any) -> bytes:
        given = module.InferInput("in", [1], "BYTES")
        given.set_data_from_numpy(np.array([b"word"], object))
        return bytes(client.infer("upper", [given]).as_numpy("out").tobytes())

    assert await both.with_triton("http", work) == b"\x04\0\0\0WORD"


async def test_generate_joins_all_texts_of_a_graph(both: BothInterfaces) -> None:
    status, answer = await _generate(both, "words", "one two three")
    assert (status, answer["out"]) == (200, "onetwothree")
    assert (await _generate(both, "upper", "größe"))[1]["out"] == "GRÖSSE"
    _, answer = await _generate(both, "either", "any_one")
    assert (answer["word"], "number" in answer) == ("one", False)
    assert len((await _infer(both, "words", "one two"))["outputs"]) == 1


@pytest.mark.parametrize(("graph", "text"), [("upper", "bad"), ("words", "one bad")])
async def test_a_failing_node_is_a_bad_request_over_rest(both: BothInterfaces, graph: str, text: str) -> None:
    status, answer = await _generate(both, graph, text)
    assert status == 400
    assert answer["error"].startswith("Mediapipe execution failed. MP status - ")
    assert "no such word" in answer["error"]


async def test_generate_stream_sends_one_event_per_text_and_the_failure(both: BothInterfaces) -> None:
    answer = await both.request("POST", "/v2/models/words/generate_stream", json={"in": "one two bad three"})
    lines = answer.text.split("\n\n")
    assert [json.loads(line[6:])["out"] for line in lines[:3]] == ["one", "two", "bad"]
    assert lines[3].startswith('event: error\ndata: {"error":"Mediapipe execution failed')
    assert lines[4:] == [""]


async def test_graphs_have_metadata_configuration_and_readiness(both: BothInterfaces) -> None:
    tensors = (
        [{"name": "in", "datatype": "INVALID", "shape": []}],
        [{"name": "out", "datatype": "INVALID", "shape": []}],
    )
    known = (await both.request("GET", "/v2/models/upper")).json()
    assert (known["versions"], known["platform"], known["inputs"], known["outputs"]) == (["1"], "OpenVINO", *tensors)
    assert (await both.request("GET", "/v2/models/upper/versions/5")).json() == known
    config = (await both.request("GET", "/v2/models/upper/config")).json()
    assert config["input"] == [{"name": "in", "data_type": "TYPE_INVALID", "dims": []}]
    assert (await both.request("GET", "/v2/models/upper/ready")).status_code == 200
    assert {each["name"] for each in (await both.request("GET", "/v2/models")).json()["models"]} == set(HANDLERS)

    def work(client: Any) -> Any:
        metadata = client.get_model_metadata("upper", as_json=True)
        config = client.get_model_config("upper", as_json=True)["config"]
        return metadata["inputs"], config["input"], client.is_model_ready("upper")

    assert await with_triton(both.grpc, work) == ([{"name": "in", "datatype": "INVALID"}], [{"name": "in"}], True)


async def test_graphs_are_called_through_the_tensorflow_api(both: BothInterfaces) -> None:
    strings = tensor("DT_STRING", (1,), string_val=[b"words"])
    path = "/tensorflow.serving.PredictionService/Predict"

    async def predict(graph: str) -> Any:
        request = predict_request(graph, {"in": strings}, 7)
        return await call(both.grpc, path, request, "tensorflow.serving.PredictResponse")

    response = await predict("upper")
    assert response.outputs["out"].tensor_content.endswith(b"WORDS")
    assert (response.model_spec.name, response.model_spec.version.value) == ("upper", 1)
    status, text = await refusal(predict("custom"))
    assert (status, text) == (
        "UNIMPLEMENTED",
        "output 'out': TensorFlow has no element type words; use KServe",
    )
    assert [each.version for each in both.plane.model_status("upper", 7, TENSORFLOW_GRPC)] == [1]
    assert both.plane.model_metadata("upper", "7", KSERVE_GRPC).serving == "1"


async def _streamed(
    both: BothInterfaces, texts: str, wanted: list[str], later: list[str] | None = None, **options: Any
) -> list[str]:
    """Stream words to ``either`` with requested outputs; return the texts of replies and errors."""

    def work(client: Any) -> list[str]:
        from tritonclient.grpc import InferInput, InferRequestedOutput

        answers: SimpleQueue[str] = SimpleQueue()

        def take(result: Any, error: Any) -> None:
            answers.put(str(error) if error else result.get_response().raw_output_contents[0].decode())

        client.start_stream(take)
        for number, text in enumerate(texts.split()):
            given = InferInput("in", [1], "BYTES")
            given.set_data_from_numpy(np.array([text.encode()], object))
            names = later if later is not None and number else wanted
            outputs = [InferRequestedOutput(name, **options) for name in names]
            client.async_stream_infer("either", [given], outputs=outputs)
        client.stop_stream()
        return [answers.get_nowait() for _ in range(answers.qsize())]

    return await with_triton(both.grpc, work)


async def test_the_first_request_of_a_stream_selects_its_outputs(both: BothInterfaces) -> None:
    assert await _streamed(both, "one 2 three 4", []) == ["one", "2", "three", "4"]
    assert await _streamed(both, "one 2 three 4", ["word"]) == ["one", "three"]
    assert await _streamed(both, "one 2 three 4", ["number"], later=[]) == ["2", "4"]
    assert await _streamed(both, "1 2", ["number", "word"]) == ["1", "2"]


async def test_unknown_and_changed_outputs_of_a_stream_are_refused(both: BothInterfaces) -> None:
    (unknown,) = await _streamed(both, "one", ["word", "text"])
    assert "requested outputs: expected some of number, word, got text" in unknown
    *_, others = await _streamed(both, "one two", ["word"], later=["number"])
    assert "requested outputs: expected those of the stream's first request (word), got others" in others


async def test_classification_of_a_stream_is_refused(both: BothInterfaces) -> None:
    *_, error = await _streamed(both, "one", ["word"], class_count=1)
    assert "output word: classification needs numbers" in error


_FINAL = "triton_enable_empty_final_response"


def _stream_request(model: str, id_: str, text: str, **options: Any) -> Any:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model, id=id_, raw_input_contents=[text.encode()])
    request.inputs.add(name="in", datatype="BYTES", shape=[len(text)])
    for name in options.pop("outputs", []):
        request.outputs.add(name=name)
    for name, value in options.items():
        setattr(request.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    return request


async def _replies(both: BothInterfaces, *requests: Any, waits: bool = True) -> list[tuple[str, str, bool | None]]:
    """Stream requests, each after the final response of the last if ``waits``; return ids, texts and marks."""

    def work(channel: Any) -> list[tuple[str, str, bool | None]]:
        from tritonclient.grpc import service_pb2_grpc

        sent: SimpleQueue[Any] = SimpleQueue()
        left = list(requests)
        for request in left[:1] if waits else left:
            sent.put(request)
        if not waits:
            sent.put(None)
        found: list[tuple[str, str, bool | None]] = []
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for reply in stub.ModelStreamInfer(iter(sent.get, None), timeout=60):
            answer = reply.infer_response
            marks = answer.parameters
            mark = marks["triton_final_response"].bool_param if "triton_final_response" in marks else None
            text = reply.error_message or b"".join(answer.raw_output_contents).decode()
            found.append((answer.id, text, mark))
            if waits and mark:
                left.pop(0)
                sent.put(left[0] if left else None)
        return found

    return await with_channel(both.grpc, work)


async def test_the_last_response_of_a_request_in_a_stream_is_marked(both: BothInterfaces) -> None:
    options = {_FINAL: True}
    requests = [
        _stream_request("words", id_, text, **options) for id_, text in (("a", "one two"), ("b", "y"), ("c", "x"))
    ]
    assert await _replies(both, *requests) == [
        *(("a", "one", False), ("a", "two", False), ("a", "", True)),
        *(("b", "y", False), ("b", "", True)),
        *(("c", "x", False), ("c", "", True)),
    ]


async def test_requests_sent_at_once_have_their_own_last_responses(both: BothInterfaces) -> None:
    requests = [_stream_request("upper", str(number), f"x{number}", **{_FINAL: True}) for number in range(20)]
    expected = [each for number in map(str, range(20)) for each in ((number, f"X{number}", False), (number, "", True))]
    assert await _replies(both, *requests, waits=False) == expected


async def test_responses_of_a_stream_have_the_ids_of_their_requests_without_marks(both: BothInterfaces) -> None:
    requests = [
        _stream_request("words", id_, text, OVMS_MP_TIMESTAMP=at)
        for id_, text, at in (("a", "one two", 10), ("", "three", 20), ("c", "four five", 30))
    ]
    assert await _replies(both, *requests, waits=False) == [
        *(("a", "one", None), ("a", "two", None), ("", "three", None), ("c", "four", None), ("c", "five", None)),
    ]


async def test_an_invalid_request_of_a_stream_is_answered_with_its_id_and_mark(both: BothInterfaces) -> None:
    bad = _stream_request("upper", "bad", "x", **{_FINAL: True})
    bad.inputs[0].name = "nothing"
    good = _stream_request("upper", "good", "y", **{_FINAL: True})
    first, *others = await _replies(both, bad, good)
    assert (first[0], first[1].startswith("Unexpected input"), first[2]) == ("bad", True, True)
    assert others == [("good", "Y", False), ("good", "", True)]


async def test_a_request_without_selected_outputs_has_only_its_last_response(both: BothInterfaces) -> None:
    requests = [
        _stream_request("either", text, f"\0\0\0\0{text}", outputs=["word"], **{_FINAL: True}) for text in ("a", "1")
    ]
    assert await _replies(both, *requests) == [("a", "a", False), ("a", "", True), ("1", "", True)]


async def test_only_requested_outputs_of_a_call_are_required(both: BothInterfaces) -> None:
    requested = {"outputs": [{"name": "word"}]}
    assert (await _infer(both, "either", "one", **requested))["outputs"][0]["name"] == "word"
    assert 'nothing came out of "word"' in (await _infer(both, "either", "2", **requested))["error"]
    assert 'nothing came out of "number"' in (await _infer(both, "either", "one"))["error"]
