from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.service import Servable
from ovmstrio.models.loading import load_model
from tests.support import ir
from tests.support.servables import EXACT
from tests.support.stub_registry import load_pass_through
from tests.unit.protocols.servers import Serving, serving_rest

DATATYPES = {
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    "INT8": np.array([[-128, 127, 0], [1, 2, 3]], np.int8),
    "INT64": np.array([[-(2**31), 2**31 - 1, 0], [1, 2, 3]]),
    "FP16": np.array([[0.5, -65504, 0], [1, 2, 3]], np.float16),
    "FP32": np.array([[0.1, -3.4e38, 0], [1, 2, 3]], np.float32),
    "FP64": np.array([[0.5, -(2.0**100), 0], [1, 2, 3]]),
}
MODELS = [
    *((name.lower(), name, array) for name, array in DATATYPES.items()),
    # The CPU plugin computes with 32 bits, so the stand-in shows that the server keeps 64.
    ("echo", "FP64", np.array([[-1.7976931348623157e308, 5e-324]])),
    ("echo", "INT64", np.array([[-(2**63), 2**63 - 1]])),
    ("echo", "UINT64", np.array([[0, 2**64 - 1]], np.uint64)),
]


async def _load(spec: ModelSpec, version: int, directory: Path) -> Servable:
    load: Any = load_pass_through if spec.name == "echo" else load_model
    servable: Servable = await load(spec, version, directory)
    return servable


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    models = {datatype.lower(): ir.passthrough(datatype, (2, 3)) for datatype in DATATYPES}
    models["strings"] = ir.string_passthrough()
    specs = tuple(
        ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT)
        for name, model in models.items()
    )
    async with serving_rest(tmp_path, models=specs, loader=_load) as server:
        yield server


async def _with_triton(serving: Serving, work: Callable[[Any], Any]) -> Any:
    from tritonclient.http import InferenceServerClient

    def connected() -> Any:
        with InferenceServerClient(serving.address) as client:
            return work(client)

    return await trio.to_thread.run_sync(connected)


def _input(name: str, array: Any, datatype: str, **options: Any) -> Any:
    from tritonclient.http import InferInput

    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **options)
    return tensor


def _infer(client: Any, model: str, tensor: Any, output: str, *, binary: bool) -> Any:
    from tritonclient.http import InferRequestedOutput

    outputs = [InferRequestedOutput(output, binary_data=binary)]
    return client.infer(model, [tensor], outputs=outputs, request_id="r1")


@pytest.mark.parametrize("binary_out", [True, False], ids=["answered as bytes", "answered as JSON"])
@pytest.mark.parametrize("binary_in", [True, False], ids=["sent as bytes", "sent as JSON"])
async def test_elements_of_every_datatype_are_unchanged(serving: Serving, *, binary_in: bool, binary_out: bool) -> None:
    def work(client: Any) -> None:
        for name, datatype, array in MODELS:
            # The client cannot send FP16 as JSON or read it from JSON.
            if datatype == "FP16" and not (binary_in and binary_out):
                continue
            output = "x" if name == "echo" else "y"
            tensor = _input("x", array, datatype, binary_data=binary_in)
            result = _infer(client, name, tensor, output, binary=binary_out)
            response = result.get_response()
            version = "2" if name == "echo" else "1"
            assert (response["model_name"], response["model_version"], response["id"]) == (name, version, "r1")
            assert response["outputs"][0]["datatype"] == datatype
            assert ("data" in response["outputs"][0]) is not binary_out
            np.testing.assert_array_equal(result.as_numpy(output), array)

    await _with_triton(serving, work)


@pytest.mark.parametrize("binary", [True, False], ids=["as bytes", "as JSON"])
async def test_texts_are_unchanged(serving: Serving, *, binary: bool) -> None:
    texts = np.array([b"plain", b"", b"a\0b", "ünï \U0001f600".encode()], np.object_)

    def work(client: Any) -> Any:
        tensor = _input("strings", texts, "BYTES", binary_data=binary)
        return _infer(client, "strings", tensor, "strings", binary=binary).as_numpy("strings")

    found = await _with_triton(serving, work)
    assert [each.encode() if isinstance(each, str) else bytes(each) for each in found] == texts.tolist()
