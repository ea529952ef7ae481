"""The port between what is served and how it is reached.

A front end knows nothing of models and a servable nothing of wires; between them stand these protocols and the
values of ``ovmstrio.request``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ovmstrio.request import InferRequest, InferResponse, ServableMetadata

__all__ = ["Servable"]


class Servable(Protocol):
    """One version of something that can be called by name."""

    @property
    def metadata(self) -> ServableMetadata:
        """Inputs, outputs and platform; constant for the life of the servable."""
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one call.

        The servable validates the request against its own inputs.  The caller owns the request, whose buffers must
        stay unchanged until this returns.

        Raises:
            InvalidRequest: the request does not fit the inputs.
            ModelFailure: the runtime failed on a valid request.
            Overloaded: its queue is full.

        Cancellation: at any checkpoint; work on the device is cancelled or its result dropped, and every pooled
        resource is given back.
        """
        ...

    async def aclose(self) -> None:
        """Give back everything that the servable holds.  Called once, when no call is in flight."""
        ...
