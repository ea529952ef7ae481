"""The server under test: addresses, model, and tensors that fit the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from types import TracebackType
from typing import Any, Final, Self

import grpc
import httpx
import numpy as np

from ovmstrio.encoding.messages import message_class

DATATYPES: Final = {
    "BOOL": ("?", "bool_contents"),
    "UINT8": ("u1", "uint_contents"),
    "UINT16": ("<u2", "uint_contents"),
    "UINT32": ("<u4", "uint_contents"),
    "UINT64": ("<u8", "uint64_contents"),
    "INT8": ("i1", "int_contents"),
    "INT16": ("<i2", "int_contents"),
    "INT32": ("<i4", "int_contents"),
    "INT64": ("<i8", "int64_contents"),
    "FP16": ("<f2", ""),
    "FP32": ("<f4", "fp32_contents"),
    "FP64": ("<f8", "fp64_contents"),
    "BYTES": ("O", "bytes_contents"),
}
"""Datatypes of the protocol: numpy type and field of typed contents, which FP16 does not have."""

_SERVICE: Final = "/inference.GRPCInferenceService/"
_SECONDS: Final = 30


class Disagreement(Exception):
    """The server violates the protocol."""


class Unsuitable(Exception):
    """A case does not apply to this model, or the server has no such interface."""


def expect(fits: bool, expected: str, got: object) -> None:
    """Check a condition of the protocol.

    Raises:
        Disagreement: the condition is false.
    """
    if not fits:
        raise Disagreement(f"expected {expected}, got {str(got)[:300]}")


@dataclass
class TriedServer:
    """One server and one of its models, called over either interface; a context manager that closes the connections.

    Attributes:
        rest: base URL; empty to skip REST.
        grpc_address: ``host:port``; empty to skip gRPC.
        model: name of the model.
        open_size: size of dynamic dimensions.
    """

    rest: str
    grpc_address: str
    model: str
    open_size: int = 1
    _http: httpx.Client = field(init=False)
    _channel: grpc.Channel | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._http = httpx.Client(base_url=self.rest or "http://unused", timeout=_SECONDS, trust_env=False)
        if self.grpc_address:
            self._channel = grpc.insecure_channel(self.grpc_address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()
        if self._channel is not None:
            self._channel.close()

    # REST

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Make a call over REST.

        Raises:
            Unsuitable: there is no REST address.
            Disagreement: the server does not answer.
        """
        if not self.rest:
            raise Unsuitable("no URL was given")
        try:
            return self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise Disagreement(f"no answer to {method} {path}: {error}") from None

    def infer_json(self, **changes: Any) -> httpx.Response:
        """Infer on zeros, with some keys of the body changed."""
        body = {"inputs": [self.json_input(each) for each in self.inputs_by_rest()], **changes}
        return self.ask("POST", f"/v2/models/{self.model}/infer", json=body)

    def inputs_by_rest(self) -> list[dict[str, Any]]:
        """Return the inputs of the model's metadata over REST."""
        inputs: list[dict[str, Any]] = self.ask("GET", f"/v2/models/{self.model}").json()["inputs"]
        return inputs

    def json_input(self, described: dict[str, Any]) -> dict[str, Any]:
        """Create a flat input of zeros from its metadata."""
        shape, datatype = self.shape_of(described["shape"]), described["datatype"]
        zero: Any = {"BOOL": False, "BYTES": "0"}.get(datatype, 0)
        return {"name": described["name"], "shape": shape, "datatype": datatype, "data": [zero] * prod(shape)}

    def shape_of(self, shape: list[Any]) -> list[int]:
        """Return a shape without dynamic dimensions."""
        return [self.open_size if int(size) < 0 else int(size) for size in shape]

    # gRPC

    def call(self, method: str, message: Any, answer: str) -> Any:
        """Make a unary call of the protocol's service.

        Raises:
            Unsuitable: there is no gRPC address.
            grpc.RpcError: the server refuses it.
        """
        if self._channel is None:
            raise Unsuitable("no --grpc was given")
        stub = self._channel.unary_unary(
            _SERVICE + method, response_deserializer=message_class(f"inference.{answer}").FromString
        )
        return stub(message.SerializeToString(), timeout=_SECONDS)

    def request(self, *, raw: bool) -> Any:
        """Create a request of zeros, in raw or typed contents.

        Raises:
            Unsuitable: the datatype of an input has no typed contents.
        """
        described = self.call(
            "ModelMetadata", message("ModelMetadataRequest", name=self.model), "ModelMetadataResponse"
        )
        made = message("ModelInferRequest", model_name=self.model)
        for each in described.inputs:
            self._add_input(made, each, raw=raw)
        return made

    def _add_input(self, made: Any, described: Any, *, raw: bool) -> None:
        shape = self.shape_of(list(described.shape))
        added = made.inputs.add(name=described.name, datatype=described.datatype, shape=shape)
        numpy_type, contents = DATATYPES.get(described.datatype, ("", ""))
        count, is_text = prod(shape), described.datatype == "BYTES"
        if raw:
            made.raw_input_contents.append(b"\1\0\0\0000" * count if is_text else bytes(np.zeros(count, numpy_type)))
        elif not contents:
            raise Unsuitable(f"{described.datatype} has no typed contents")
        else:
            zeros = [b"0"] * count if is_text else np.zeros(count, numpy_type).tolist()
            getattr(added.contents, contents).extend(zeros)

    def infer(self, request: Any) -> Any:
        """Make one inference over gRPC."""
        return self.call("ModelInfer", request, "ModelInferResponse")

    def refusal(self, method: str, message: Any, answer: str) -> grpc.StatusCode:
        """Make a call that must fail, and return its status.

        Raises:
            Disagreement: the call succeeds.
        """
        try:
            found = self.call(method, message, answer)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        raise Disagreement(f"expected an error, got {str(found)[:200]!r}")


def message(kind: str, /, **fields: Any) -> Any:
    """Create a message of the protocol."""
    return message_class(f"inference.{kind}")(**fields)
