"""Triton's own HTTP client against the front end and models that OpenVINO runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.servable import Servable
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.pass_through import load_pass_through
from tests.support.servables import EXACT
from tests.unit.api.rest.servers import Serving, serving_rest

ResultT = TypeVar("ResultT")

DATATYPES = {
    "BOOL": np.array([[True, False, True], [False, False, True]]),
    "INT8": np.array([[-128, 127, 0], [1, 2, 3]], np.int8),
    "INT64": np.array([[-(2**31), 2**31 - 1, 0], [1, 2, 3]]),
    "FP16": np.array([[0.5, -65504, 0], [1, 2, 3]], np.float16),
    "FP32": np.array([[0.1, -3.4e38, 0], [1, 2, 3]], np.float32),
    "FP64": np.array([[0.5, -(2.0**100), 0], [1, 2, 3]]),
}
RAW_ONLY = {"FP16"}


async def _load(spec: ModelSpec, version: int, directory: Path) -> Servable:
    load: Any = load_pass_through if spec.name == "echo" else load_model
    servable: Servable = await load(spec, version, directory)
    return servable


@pytest.fixture
async def triton_serving(tmp_path: Path) -> AsyncIterator[Serving]:
    """Serve a model for each datatype that gives back what it gets."""
    models = {datatype.lower(): ir.passthrough(datatype, (2, 3)) for datatype in [*DATATYPES, "BF16"]}
    models["strings"] = ir.string_passthrough()
    specs = tuple(
        ModelSpec(name=name, base_path=ir.save(model, tmp_path, name), plugin_config=EXACT)
        for name, model in models.items()
    )
    async with serving_rest(tmp_path, models=specs, loader=_load) as server:
        yield server


async def _with_triton(serving: Serving, work: Callable[[Any], ResultT]) -> ResultT:
    from tritonclient.http import InferenceServerClient

    def connected() -> ResultT:
        with InferenceServerClient(serving.address) as client:
            return work(client)

    return await trio.to_thread.run_sync(connected)


def _infer(client: Any, model: str, inputs: Any, output: str, *, binary_in: bool, binary_out: bool) -> Any:
    from tritonclient.http import InferInput, InferRequestedOutput

    name, array, datatype = inputs
    given = InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary_in)
    wanted = InferRequestedOutput(output, binary_data=binary_out)
    return client.infer(model, [given], outputs=[wanted], request_id="r1")


@pytest.mark.parametrize("binary_out", [True, False], ids=["answered as bytes", "answered as JSON"])
@pytest.mark.parametrize("binary_in", [True, False], ids=["sent as bytes", "sent as JSON"])
async def test_every_datatype_comes_back_unchanged(
    triton_serving: Serving, *, binary_in: bool, binary_out: bool
) -> None:
    """Each bit of each element survives both ways of sending it and of having it answered."""

    def work(client: Any) -> None:
        for datatype, array in DATATYPES.items():
            if datatype in RAW_ONLY and not (binary_in and binary_out):
                continue
            given = ("x", array, datatype)
            result = _infer(client, datatype.lower(), given, "y", binary_in=binary_in, binary_out=binary_out)
            response = result.get_response()
            assert (response["model_name"], response["model_version"], response["id"]) == (datatype.lower(), "1", "r1")
            assert response["outputs"][0]["datatype"] == datatype
            assert ("data" in response["outputs"][0]) is not binary_out
            np.testing.assert_array_equal(result.as_numpy("y"), array)

    await _with_triton(triton_serving, work)


@pytest.mark.parametrize("binary", [True, False], ids=["as bytes", "as JSON"])
async def test_64_bits_are_kept(triton_serving: Serving, *, binary: bool) -> None:
    """The ends of every 64-bit range survive; the processor's own 32 bits for them are not in the way here."""
    ends = {
        "FP64": np.array([[-1.7976931348623157e308, 5e-324]]),
        "INT64": np.array([[-(2**63), 2**63 - 1]]),
        "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    }

    def work(client: Any) -> None:
        for datatype, array in ends.items():
            result = _infer(client, "echo", ("x", array, datatype), "x", binary_in=binary, binary_out=binary)
            np.testing.assert_array_equal(result.as_numpy("x"), array)

    await _with_triton(triton_serving, work)


async def test_bf16_comes_back_as_bytes_and_as_numbers(triton_serving: Serving) -> None:
    """Bytes carry the bits, and JSON shows the numbers."""
    import ml_dtypes

    array = np.array([[0.5, -2, 0], [1, 2, 3]], ml_dtypes.bfloat16)

    def work(client: Any) -> tuple[Any, Any]:
        given = ("x", array, "BF16")
        raw = _infer(client, "bf16", given, "y", binary_in=True, binary_out=True)
        shown = _infer(client, "bf16", given, "y", binary_in=True, binary_out=False)
        return raw.as_numpy("y"), shown.get_response()["outputs"][0]["data"]

    raw, shown = await _with_triton(triton_serving, work)
    np.testing.assert_array_equal(raw, array)
    assert shown == array.reshape(-1).tolist()


@pytest.mark.parametrize("binary", [True, False], ids=["as bytes", "as JSON"])
async def test_texts_come_back(triton_serving: Serving, *, binary: bool) -> None:
    """BYTES with empty elements, NUL and characters beyond ASCII survive."""
    texts = np.array([b"plain", b"", b"a\0b", "ünï \U0001f600".encode()], np.object_)

    def work(client: Any) -> Any:
        given = ("strings", texts, "BYTES")
        result = _infer(client, "strings", given, "strings", binary_in=binary, binary_out=binary)
        return result.as_numpy("strings")

    assert [_bytes(text) for text in await _with_triton(triton_serving, work)] == texts.tolist()


def _bytes(text: Any) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


async def test_no_output_listed_means_all(triton_serving: Serving) -> None:
    """The client then asks for binary data of the whole request, and gets it."""
    from tritonclient.http import InferInput

    array = DATATYPES["FP32"]

    def work(client: Any) -> Any:
        given = InferInput("x", [2, 3], "FP32")
        given.set_data_from_numpy(array)
        return client.infer("fp32", [given])

    result = await _with_triton(triton_serving, work)
    np.testing.assert_array_equal(result.as_numpy("y"), array)
    assert result.get_output("y")["parameters"] == {"binary_data_size": 24}


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compressed_requests_are_taken(triton_serving: Serving, algorithm: str) -> None:
    """The client's own compression of requests is undone."""
    from tritonclient.http import InferInput

    array = DATATYPES["FP32"]

    def work(client: Any) -> Any:
        given = InferInput("x", [2, 3], "FP32")
        given.set_data_from_numpy(array)
        return client.infer("fp32", [given], request_compression_algorithm=algorithm).as_numpy("y")

    np.testing.assert_array_equal(await _with_triton(triton_serving, work), array)


async def test_the_client_learns_what_is_served(triton_serving: Serving) -> None:
    """Health, metadata, configuration and the repository index have the forms that the client reads."""

    def work(client: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("fp32")
        assert client.is_model_ready("echo", "1")
        assert not client.is_model_ready("nobody")
        assert client.get_server_metadata()["name"] == "OpenVINO Model Server"
        assert client.get_model_metadata("int64") == {
            "name": "int64",
            "versions": ["1"],
            "platform": "OpenVINO",
            "inputs": [{"name": "x", "datatype": "INT64", "shape": [2, 3]}],
            "outputs": [{"name": "y", "datatype": "INT64", "shape": [2, 3]}],
        }
        assert client.get_model_config("int64")["input"] == [{"name": "x", "data_type": "TYPE_INT64", "dims": [2, 3]}]
        index = {(entry["name"], entry["version"], entry["state"]) for entry in client.get_model_repository_index()}
        assert {("echo", "1", "READY"), ("echo", "2", "READY"), ("strings", "1", "READY")} < index

    await _with_triton(triton_serving, work)


async def test_refusals_reach_the_client_as_its_own_error(triton_serving: Serving) -> None:
    """Status and text are those of the server."""
    from tritonclient.utils import InferenceServerException

    def work(client: Any) -> tuple[str, str]:
        with pytest.raises(InferenceServerException) as caught:
            _infer(client, "fp32", ("x", np.zeros((2, 4), np.float32), "FP32"), "y", binary_in=True, binary_out=True)
        return str(caught.value.status()), caught.value.message()

    status, message = await _with_triton(triton_serving, work)
    assert status == "400"
    assert message.startswith("Invalid input shape")
