"""What the data plane tells of what is served: to those who ask about it, and to those who call it in the wrong way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import ServiceMissing
from ovmstrio.runtimes.kind import Takes

if TYPE_CHECKING:
    from ovmstrio.core.tensor import TensorSpec
    from ovmstrio.registry import Lease

__all__ = ["DEFAULT_NAME", "Description", "ModelMetadata", "no_streams", "otherwise"]

DEFAULT_NAME: Final = "OpenVINO Model Server"
"""What the server is called; clients of OVMS look at it."""


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What the server tells of one servable.

    ``versions`` are all that can be called, ascending; ``serving`` is the one that was asked about.  For
    ``joined_rows`` see ``ServableMetadata``.
    """

    name: str
    versions: list[str]
    serving: str
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    extra: dict[str, Any]
    joined_rows: int
    has_sequences: bool
    has_streams: bool


class Description(NamedTuple):
    """What a caller must know to call a servable with as little as names and values."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    has_streams: bool


def no_streams(name: str) -> ServiceMissing:
    """Refuse a stream to a name that nothing has that takes streams."""
    return ServiceMissing(f'nothing that can be streamed to is served under the name "{name[:80]}"')


def otherwise(lease: Lease, untaken: str) -> str:
    """Say what a service does not take, and how it is called."""
    ways = {
        Takes.TENSORS: "with single requests",
        Takes.HTTP: f"at /{lease.name}",
        Takes.GRPC: "by its own gRPC services",
        Takes.STREAMS: "by streams",
        Takes.PAYLOADS: "below /v3",
        Takes.GENERATION: "by OpenAI's API below /v3",
    }
    named = " or ".join(way for takes, way in ways.items() if takes in lease.takes)
    return f'the {lease.kind} "{lease.name}" takes no {untaken}; call it {named}'
