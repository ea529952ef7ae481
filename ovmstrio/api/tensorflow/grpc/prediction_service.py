"""``tensorflow.serving.PredictionService``: inference and metadata over the data plane.

``Predict`` works on the domain's values, which the codec reads and writes; ``GetModelMetadata`` on betterproto2's
messages.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from grpclib.const import Cardinality, Handler

from ovmstrio.api.admitted_calls import answer_admitted, first_text, keep_place
from ovmstrio.api.doors import TENSORFLOW_GRPC
from ovmstrio.api.tensorflow.grpc.predict_messages import decode_predict, encode_predict
from ovmstrio.api.tensorflow.tensorflow_types import describe_signature
from ovmstrio.core.errors import InvalidRequest, NotSupported
from ovmstrio.encoding.generated.google import protobuf
from ovmstrio.encoding.generated.tensorflow import error
from ovmstrio.encoding.generated.tensorflow import serving as pb
from ovmstrio.wire.grpc.stream import OrderedHandler

if TYPE_CHECKING:
    from ovmstrio.api.raw_contents import WrittenMessage
    from ovmstrio.core.request import InferResponse
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.registry import VersionStatus
    from ovmstrio.wire.grpc.stream import Call

__all__ = ["ModelService", "PredictionService"]

_PREDICT: Final = "/tensorflow.serving.PredictionService/Predict"
_SIGNATURE_DEF: Final = "signature_def"
"""An output that no filter takes away: without it a sequence could not be gone on with."""


class PredictionService(pb.PredictionServiceBase):
    """The service, hosted by a transport that maps the domain's errors to statuses."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def __mapping__(self) -> dict[str, Handler]:
        """Give the handlers by path."""
        predict = OrderedHandler(self._predict, Cardinality.UNARY_UNARY, bytes, bytes)
        return {**super().__mapping__(), _PREDICT: predict}

    async def _predict(self, call: Call) -> None:
        """Answer one inference.

        Raises:
            ServerError: what the data plane raised.
            NotSupported: an output has an element type that TensorFlow has not.

        Cancellation: at any checkpoint; the data plane gives back what the call held.
        """
        data: bytes = await call.recv_message()
        if self._plane.has_limits():
            # The first field is the model's specification, whose first field is the name.
            name = first_text(first_text(data))
            answer = partial(self._answer, call, data, name)
            await answer_admitted(self._plane, TENSORFLOW_GRPC, name, answer, arrival=call.arrival)
        else:
            await self._answer(call, data)

    async def _answer(self, call: Call, data: bytes, name: bytes = b"") -> None:
        request = decode_predict(data)
        keep_place(request.model_name, name)
        request.deadline, request.arrival = call.deadline, call.arrival
        await call.send_message(await self._plane.infer(request, TENSORFLOW_GRPC, _render))

    async def get_model_metadata(self, message: pb.GetModelMetadataRequest) -> pb.GetModelMetadataResponse:
        """Tell the inputs and outputs of a version, or of the default one.  Does not block.

        Raises:
            NotFound: the name or version is unknown or retired.
            VersionLoading: it is not loaded yet.
            InvalidRequest: no model is named, or something else than the signature is asked for.
        """
        spec = message.model_spec
        if spec is None:
            raise InvalidRequest("model_spec missing in request")
        if message.metadata_field != [_SIGNATURE_DEF]:
            raise InvalidRequest(
                f'Invalid signature name - metadata_field: expected "{_SIGNATURE_DEF}" and nothing else, '
                f"got {message.metadata_field}"
            )
        model = self._plane.model_metadata(spec.name, str(spec.version or 0), TENSORFLOW_GRPC)
        signature = protobuf.Any.pack(describe_signature(model))
        return pb.GetModelMetadataResponse(
            pb.ModelSpec(name=model.name, version=int(model.serving)), {_SIGNATURE_DEF: signature}
        )


class ModelService(pb.ModelServiceBase):
    """The service, hosted by a transport that maps the domain's errors to statuses."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def get_model_status(self, message: pb.GetModelStatusRequest) -> pb.GetModelStatusResponse:
        """Tell the state of one version, or of every version ever seen.  Does not block.

        Raises:
            NotFound: the name or version is unknown.
        """
        spec = message.model_spec or pb.ModelSpec()
        statuses = self._plane.model_status(spec.name, spec.version or 0, TENSORFLOW_GRPC)
        return pb.GetModelStatusResponse([_describe(status) for status in statuses])

    async def handle_reload_config_request(self, _: pb.ReloadConfigRequest) -> pb.ReloadConfigResponse:
        """Refuse settings, which this server takes from its configuration file alone.  Does not block.

        Raises:
            NotSupported: always.
        """
        raise NotSupported(
            "settings are taken from the configuration file only; change it, and POST /v1/config/reload over REST "
            "if the server does not watch it"
        )


def _render(response: InferResponse) -> tuple[WrittenMessage, int]:
    data = encode_predict(response)
    return data, len(data)


def _describe(status: VersionStatus) -> pb.ModelVersionStatus:
    return pb.ModelVersionStatus(
        version=status.version,
        state=pb.ModelVersionStatusState(status.state),
        status=pb.StatusProto(error.Code[status.error_code], status.error_code),
    )
