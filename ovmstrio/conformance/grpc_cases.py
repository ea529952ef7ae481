"""Rules of the specification for gRPC, each with its check."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import grpc
import numpy as np

from ovmstrio.conformance.target import DATATYPES, TriedServer, Unsuitable, expect, message

_MISSING: Final = "there-is-no-such-model"
_BLAME: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)


def _is_true(method: str, field: str, *, names_model: bool = False) -> Callable[[TriedServer], None]:
    def check(target: TriedServer) -> None:
        fields = {"name": target.model} if names_model else {}
        answer = target.call(method, message(f"{method}Request", **fields), f"{method}Response")
        expect(getattr(answer, field) is True, f"{field}: true", answer)

    return check


def _unready_model(target: TriedServer) -> None:
    request = message("ModelReadyRequest", name=_MISSING)
    try:
        answer = target.call("ModelReady", request, "ModelReadyResponse")
    except grpc.RpcError as error:
        code = error.code()
        expect(code in _BLAME, "NOT_FOUND, or ready: false", code)
    else:
        expect(answer.ready is False, "NOT_FOUND, or ready: false", answer)


def _server_metadata(target: TriedServer) -> None:
    answer = target.call("ServerMetadata", message("ServerMetadataRequest"), "ServerMetadataResponse")
    expect(bool(answer.name and answer.version), "a name and a version", answer)


def _model_metadata(target: TriedServer) -> None:
    answer = target.call("ModelMetadata", message("ModelMetadataRequest", name=target.model), "ModelMetadataResponse")
    expect(answer.name == target.model, f"name: {target.model}", answer.name)
    for tensor in (*answer.inputs, *answer.outputs):
        expect(bool(tensor.name), "a tensor with a name", tensor)
        expect(tensor.datatype in {*DATATYPES, "BF16"}, "a datatype of the protocol", tensor.datatype)


def _unknown_metadata(target: TriedServer) -> None:
    code = target.refusal("ModelMetadata", message("ModelMetadataRequest", name=_MISSING), "ModelMetadataResponse")
    expect(code in _BLAME, "NOT_FOUND", code)


def _infers(*, raw: bool) -> Callable[[TriedServer], None]:
    def check(target: TriedServer) -> None:
        answer = target.infer(target.request(raw=raw))
        expect(answer.model_name == target.model, f"model_name: {target.model}", answer.model_name)
        _elements(answer)

    return check


def _elements(answer: Any) -> list[Any]:
    """Return the elements of all outputs, from raw or typed contents, and check their number against the shapes."""
    found = []
    for number, output in enumerate(answer.outputs):
        numpy_type, contents = DATATYPES.get(output.datatype, ("<u2", ""))
        if answer.raw_output_contents and output.datatype == "BYTES":
            found.append(bytes(answer.raw_output_contents[number]))
            continue
        if answer.raw_output_contents:
            elements = np.frombuffer(answer.raw_output_contents[number], numpy_type).tolist()
        else:
            elements = list(getattr(output.contents, contents))
        expect(len(elements) == prod(output.shape), f"{prod(output.shape)} elements", len(elements))
        found.append(elements)
    return found


def _typed_is_raw(target: TriedServer) -> None:
    typed, raw = (_elements(target.infer(target.request(raw=raw))) for raw in (False, True))
    expect(typed == raw, "the same outputs for typed and raw contents", "others")


def _echoes_id(target: TriedServer) -> None:
    request = target.request(raw=True)
    request.id = "the-id"
    found = target.infer(request).id
    expect(found == "the-id", 'id: "the-id"', found)


def _obeys_outputs(target: TriedServer) -> None:
    request = message("ModelMetadataRequest", name=target.model)
    names = [each.name for each in target.call("ModelMetadata", request, "ModelMetadataResponse").outputs]
    if not names:
        raise Unsuitable("the metadata of the model has no outputs")
    request = target.request(raw=True)
    request.outputs.add(name=names[-1])
    found = [each.name for each in target.infer(request).outputs]
    expect(found == names[-1:], f"the one output {names[-1]}", found)


def _takes_parameters(target: TriedServer) -> None:
    request = target.request(raw=True)
    request.parameters["nobody_knows"].bool_param = True
    request.parameters["a_number"].int64_param = 5
    request.parameters["a_text"].string_param = "x"
    target.infer(request)


def _refuses(change: Callable[[Any], Any]) -> Callable[[TriedServer], None]:
    """Create a case of a request with one error."""

    def check(target: TriedServer) -> None:
        request = target.request(raw=True)
        if not request.inputs:
            raise Unsuitable("the model has no inputs")
        change(request)
        code = target.refusal("ModelInfer", request, "ModelInferResponse")
        expect(code in _BLAME, "INVALID_ARGUMENT", code)

    return check


def _rename_model(request: Any) -> None:
    request.model_name = _MISSING


def _rename_input(request: Any) -> None:
    request.inputs[0].name = "there-is-no-such-input"


def _drop_inputs(request: Any) -> None:
    del request.inputs[:]
    del request.raw_input_contents[:]


def _change_datatype(request: Any) -> None:
    request.inputs[0].datatype = "FP31"


def _cut_contents(request: Any) -> None:
    request.raw_input_contents[0] = bytes(request.raw_input_contents[0])[:-1]


def _one_buffer_more(request: Any) -> None:
    request.raw_input_contents.append(b"\0")


def _both_styles(request: Any) -> None:
    request.inputs[0].contents.fp32_contents.append(0.0)


GRPC_CASES: Final[tuple[tuple[str, str, Callable[[TriedServer], None]], ...]] = (
    ("health", "ServerLive is true", _is_true("ServerLive", "live")),
    ("health", "ServerReady is true", _is_true("ServerReady", "ready")),
    ("health", "ModelReady is true", _is_true("ModelReady", "ready", names_model=True)),
    ("health", "ModelReady of an unknown model is not true", _unready_model),
    ("server metadata", "metadata has name and version", _server_metadata),
    ("model metadata", "metadata has name, inputs and outputs", _model_metadata),
    ("model metadata", "an unknown model is an error", _unknown_metadata),
    ("inference", "raw contents are accepted, and outputs have as many elements as their shapes", _infers(raw=True)),
    ("inference", "typed contents are accepted, and outputs have as many elements as their shapes", _infers(raw=False)),
    ("inference", "typed and raw contents give the same outputs", _typed_is_raw),
    ("inference", "the response has the id of the request", _echoes_id),
    ("inference", "the response has only the requested outputs", _obeys_outputs),
    ("inference", "unknown parameters are ignored", _takes_parameters),
    ("errors", "an unknown model is refused", _refuses(_rename_model)),
    ("errors", "an unknown input is refused", _refuses(_rename_input)),
    ("errors", "a missing input is refused", _refuses(_drop_inputs)),
    ("errors", "an unknown datatype is refused", _refuses(_change_datatype)),
    ("errors", "contents that do not fill the shape are refused", _refuses(_cut_contents)),
    ("errors", "more raw contents than inputs are refused", _refuses(_one_buffer_more)),
    ("errors", "typed together with raw contents are refused", _refuses(_both_styles)),
)
"""Part of the protocol, rule and check of each case."""
