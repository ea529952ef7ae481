"""What the calls have in common that change the server, over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.admin.locality import check_is_local
from ovmstrio.protocol.generated import inference as pb
from ovmstrio.wire.grpc.stream import current_call

if TYPE_CHECKING:
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["AdministeredService"]


class AdministeredService(pb.GrpcInferenceServiceBase):
    """A service over a data plane, which only clients on this machine may change unless others may, too."""

    def __init__(self, plane: DataPlane, *, allows_remote: bool = False) -> None:
        self._plane = plane
        self._allows_remote = allows_remote

    def _check_may_change(self) -> None:
        """Let pass who may change the server.

        Raises:
            PermissionDenied: who asks is, or may be, on another machine.
        """
        if not self._allows_remote:
            check_is_local(current_call().peer.host)
