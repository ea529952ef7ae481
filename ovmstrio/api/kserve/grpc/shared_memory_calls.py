"""``inference.GRPCInferenceService``: the calls by which clients register regions of shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ovmstrio.api.kserve.grpc.administration import AdministeredService
from ovmstrio.api.kserve.shared_memory import NO_CUDA
from ovmstrio.core.errors import NotSupported
from ovmstrio.dataplane.whole_changes import register_region, unregister_region
from ovmstrio.encoding.generated import inference as pb

if TYPE_CHECKING:
    from ovmstrio.dataplane.shared_memory.client_regions import ClientRegion

__all__ = ["SharedMemoryCalls"]


class SharedMemoryCalls(AdministeredService):
    """The calls of the extensions for shared memory of the system and of CUDA, of which the latter is refused."""

    async def system_shared_memory_status(
        self, message: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        """List one region, or all.  Does not block.

        Raises:
            NotFound: no region has that name.
        """
        regions = self._plane.regions.listed(message.name)
        return pb.SystemSharedMemoryStatusResponse({region.name: _status(region) for region in regions})

    async def system_shared_memory_register(
        self, message: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Make a region known.

        Raises:
            PermissionDenied: who asks may not, or the object is not the server's to use.
            ServerError: as :meth:`ClientRegions.register`.
        """
        with self._making("shared memory registered", region=message.name):
            await register_region(self._plane, message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(
        self, message: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget one region, or all.

        Raises:
            PermissionDenied: who asks may not.
        """
        with self._making("shared memory unregistered", region=message.name):
            await unregister_region(self._plane, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, _: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        """List no region.  Does not block."""
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_shared_memory_register(
        self, _: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        """Refuse.

        Raises:
            NotSupported: always.
        """
        raise NotSupported(NO_CUDA)

    async def cuda_shared_memory_unregister(
        self, _: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        """Forget what there never is.  Does not block."""
        return pb.CudaSharedMemoryUnregisterResponse()


def _status(region: ClientRegion) -> pb.SystemSharedMemoryStatusResponseRegionStatus:
    return pb.SystemSharedMemoryStatusResponseRegionStatus(region.name, region.key, region.offset, region.byte_size)
