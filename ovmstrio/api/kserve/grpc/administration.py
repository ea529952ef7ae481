"""What the calls have in common that change the server, over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.admin.changes import Changes
from ovmstrio.encoding.generated import inference as pb
from ovmstrio.wire.grpc.stream import current_call

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["AdministeredService"]


class AdministeredService(pb.GrpcInferenceServiceBase):
    """A service over a data plane, which is changed by those who may."""

    def __init__(self, plane: DataPlane, changes: Changes | None = None) -> None:
        self._plane = plane
        self._changes = changes or Changes()

    def _making(self, change: str, **facts: object) -> AbstractContextManager[None]:
        """Make a change within the block.

        Raises:
            PermissionDenied: who asks may not.
        """
        return self._changes.making(change, current_call().client, **facts)
