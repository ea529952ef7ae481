"""``tensorflow.serving.ModelService``: the states of versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.doors import TENSORFLOW_GRPC
from ovmstrio.core.errors import NotSupported
from ovmstrio.protocol.generated.tensorflow import error
from ovmstrio.protocol.generated.tensorflow import serving as pb

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane
    from ovmstrio.registry import VersionStatus

__all__ = ["ModelService"]


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


def _describe(status: VersionStatus) -> pb.ModelVersionStatus:
    return pb.ModelVersionStatus(
        version=status.version,
        state=pb.ModelVersionStatusState(status.state),
        status=pb.StatusProto(error.Code[status.error_code], status.error_code),
    )
