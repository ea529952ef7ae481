"""Rules of the specification for REST, each with its check."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import httpx

from ovmstrio.conformance.target import DATATYPES, TriedServer, Unsuitable, expect

_MISSING: Final = "there-is-no-such-model"
_OK: Final = 200
_CLIENT_ERRORS: Final = range(400, 500)


def _succeeds(path: str) -> Callable[[TriedServer], None]:
    def check(target: TriedServer) -> None:
        answer = target.ask("GET", path.format(model=target.model))
        expect(answer.status_code == _OK, "status 200", answer.status_code)

    return check


def _is_refused(answer: httpx.Response) -> None:
    """Check that a response is a client error in the protocol's form."""
    expect(answer.status_code in _CLIENT_ERRORS, "a status of 400 to 499", f"{answer.status_code} {answer.text}")
    document = _document(answer)
    expect(isinstance(document.get("error"), str), 'an object with a text "error"', answer.text)


def _document(answer: httpx.Response) -> dict[str, Any]:
    try:
        document = answer.json()
    except ValueError:
        document = None
    expect(isinstance(document, dict), "a JSON object", answer.text)
    return dict(document or {})


def _unready_model(target: TriedServer) -> None:
    answer = target.ask("GET", f"/v2/models/{_MISSING}/ready")
    expect(answer.status_code in _CLIENT_ERRORS, "a status of 400 to 499", answer.status_code)


def _server_metadata(target: TriedServer) -> None:
    document = _document(target.ask("GET", "/v2"))
    for key, kind in (("name", str), ("version", str), ("extensions", list)):
        expect(isinstance(document.get(key), kind), f"{key}: a {kind.__name__}", document.get(key))
    expect(all(isinstance(each, str) for each in document["extensions"]), "extensions: texts", document["extensions"])


def _model_metadata(target: TriedServer) -> None:
    document = _document(target.ask("GET", f"/v2/models/{target.model}"))
    expect(document.get("name") == target.model, f"name: {target.model}", document.get("name"))
    expect(isinstance(document.get("platform"), str), "platform: a text", document.get("platform"))
    versions = document.get("versions", [])
    expect(isinstance(versions, list) and all(isinstance(each, str) for each in versions), "versions: texts", versions)
    for key in ("inputs", "outputs"):
        expect(isinstance(document.get(key), list), f"{key}: a list", document.get(key))
        for tensor in document[key]:
            _check_description(tensor)


def _check_description(tensor: Any) -> None:
    expect(isinstance(tensor, dict) and isinstance(tensor.get("name"), str), "a tensor with a name", tensor)
    expect(tensor.get("datatype") in {*DATATYPES, "BF16"}, "a datatype of the protocol", tensor.get("datatype"))
    shape = tensor.get("shape")
    expect(isinstance(shape, list) and all(type(each) is int for each in shape), "shape: integers", shape)


def _unknown_metadata(target: TriedServer) -> None:
    _is_refused(target.ask("GET", f"/v2/models/{_MISSING}"))


def _infers(target: TriedServer) -> None:
    answer = target.infer_json()
    expect(answer.status_code == _OK, "status 200", f"{answer.status_code} {answer.text}")
    document = _document(answer)
    expect(document.get("model_name") == target.model, f"model_name: {target.model}", document.get("model_name"))
    expect(isinstance(document.get("outputs"), list) and document["outputs"], "outputs: a list", document)
    for tensor in document["outputs"]:
        _check_description(tensor)
        expect(_count(tensor["data"]) == prod(tensor["shape"]), "as many elements as the shape has", tensor["shape"])


def _count(data: Any) -> int:
    return sum(map(_count, data)) if isinstance(data, list) else 1


def _nested_is_flat(target: TriedServer) -> None:
    inputs = [target.json_input(each) for each in target.inputs_by_rest()]
    nested = [each | {"data": _nested(each["data"], each["shape"])} for each in inputs]
    flat, deep = target.infer_json(inputs=inputs), target.infer_json(inputs=nested)
    expect(deep.status_code == _OK, "status 200", f"{deep.status_code} {deep.text}")
    expect(deep.json()["outputs"] == flat.json()["outputs"], "the outputs of flat data", deep.text)


def _nested(data: list[Any], shape: list[int]) -> list[Any]:
    if len(shape) < 2:  # noqa: PLR2004 - one dimension is a list
        return data
    size = len(data) // shape[0] if shape[0] else 0
    return [_nested(data[begin * size : (begin + 1) * size], shape[1:]) for begin in range(shape[0])]


def _echoes_id(target: TriedServer) -> None:
    document = _document(target.infer_json(id="the-id"))
    expect(document.get("id") == "the-id", 'id: "the-id"', document.get("id"))


def _obeys_outputs(target: TriedServer) -> None:
    names = [each["name"] for each in target.ask("GET", f"/v2/models/{target.model}").json()["outputs"]]
    if not names:
        raise Unsuitable("the metadata of the model has no outputs")
    document = _document(target.infer_json(outputs=[{"name": names[-1]}]))
    found = [each["name"] for each in document.get("outputs", [])]
    expect(found == names[-1:], f"the one output {names[-1]}", found)


def _takes_parameters(target: TriedServer) -> None:
    answer = target.infer_json(parameters={"nobody_knows": True, "a_number": 5, "a_text": "x"})
    expect(answer.status_code == _OK, "status 200", f"{answer.status_code} {answer.text}")


def _takes_versions(target: TriedServer) -> None:
    versions = target.ask("GET", f"/v2/models/{target.model}").json().get("versions")
    if not versions:
        raise Unsuitable("the model has no versions")
    path = f"/v2/models/{target.model}/versions/{versions[-1]}"
    body = {"inputs": [target.json_input(each) for each in target.inputs_by_rest()]}
    for answer in (
        target.ask("GET", path),
        target.ask("GET", f"{path}/ready"),
        target.ask("POST", f"{path}/infer", json=body),
    ):
        expect(answer.status_code == _OK, "status 200", f"{answer.request.url.path}: {answer.status_code}")
    found = target.ask("POST", f"{path}/infer", json=body).json().get("model_version")
    expect(found in (None, versions[-1]), f"model_version: {versions[-1]}", found)


def _refuses(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[TriedServer], None]:
    """Create a case of inputs with one error."""

    def check(target: TriedServer) -> None:
        inputs = [target.json_input(each) for each in target.inputs_by_rest()]
        if not inputs:
            raise Unsuitable("the model has no inputs")
        _is_refused(target.infer_json(inputs=change(inputs)))

    return check


def _with(**changes: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda inputs: [inputs[0] | changes, *inputs[1:]]


def _one_less(inputs: list[dict[str, Any]]) -> Any:
    return [inputs[0] | {"data": [*inputs[0]["data"], *inputs[0]["data"][:1], 0]}, *inputs[1:]]


def _refuses_body(body: bytes) -> Callable[[TriedServer], None]:
    def check(target: TriedServer) -> None:
        _is_refused(target.ask("POST", f"/v2/models/{target.model}/infer", content=body))

    return check


def _unknown_infer(target: TriedServer) -> None:
    _is_refused(target.ask("POST", f"/v2/models/{_MISSING}/infer", json={"inputs": []}))


REST_CASES: Final[tuple[tuple[str, str, Callable[[TriedServer], None]], ...]] = (
    ("health", "a live server answers 200", _succeeds("/v2/health/live")),
    ("health", "a ready server answers 200", _succeeds("/v2/health/ready")),
    ("health", "a ready model answers 200", _succeeds("/v2/models/{model}/ready")),
    ("health", "an unknown model answers 4xx", _unready_model),
    ("server metadata", "metadata has name, version and extensions", _server_metadata),
    ("model metadata", "metadata has name, versions, platform, inputs and outputs", _model_metadata),
    ("model metadata", "an unknown model is an error object with 4xx", _unknown_metadata),
    ("inference", "flat data is accepted, and each output has name, shape, datatype and data", _infers),
    ("inference", "nested and flat data give the same outputs", _nested_is_flat),
    ("inference", "the response has the id of the request", _echoes_id),
    ("inference", "the response has only the requested outputs", _obeys_outputs),
    ("inference", "unknown parameters are ignored", _takes_parameters),
    ("inference", "the path may contain a version", _takes_versions),
    ("errors", "an unknown model is refused", _unknown_infer),
    ("errors", "an unknown input is refused", _refuses(_with(name="there-is-no-such-input"))),
    ("errors", "a missing input is refused", _refuses(lambda _: [])),
    ("errors", "too many elements for the shape are refused", _refuses(_one_less)),
    ("errors", "an unknown datatype is refused", _refuses(_with(datatype="FP31"))),
    ("errors", "a shape that is not a list is refused", _refuses(_with(shape="1"))),
    ("errors", "data that is not a list is refused", _refuses(_with(data={"a": 1}))),
    ("errors", "a body that is not JSON is refused", _refuses_body(b"{")),
    ("errors", "a body that is not an object is refused", _refuses_body(b"[]")),
    ("errors", "a body without inputs is refused", _refuses_body(b"{}")),
)
"""Part of the protocol, rule and check of each case."""
