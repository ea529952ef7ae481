"""What both interfaces say of shared memory."""

from typing import Final

__all__ = ["NO_CUDA"]

NO_CUDA: Final = (
    "CUDA shared memory is not supported: models run on OpenVINO's devices; "
    "register system shared memory, or send tensors in requests"
)
