"""Where the service of an entry runs in a cluster: with which others, in how many replicas, and with what each has.

One server on one machine has no use for it, and reads it only to tell what is wrong with it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ovmstrio.config.documents import expected_by
from ovmstrio.config.findings import shown
from ovmstrio.core.errors import Problem

__all__ = ["Autoscaling", "PlacementSpec", "read_placement"]

Seconds = Annotated[float, Field(ge=0, le=86_400)]
Replicas = Annotated[int, Field(ge=1, le=100_000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Autoscaling(_Part):
    """How many replicas there are, by the requests that each has under way, and by those of them that wait there."""

    min_replicas: Replicas = 1
    max_replicas: Replicas
    target_ongoing_requests: Annotated[float, Field(gt=0)] = 8.0
    target_waiting_requests: Annotated[float, Field(gt=0)] | None = None
    upscale_delay_s: Seconds = 30.0
    downscale_delay_s: Seconds = 600.0

    @model_validator(mode="after")
    def _ordered(self) -> Autoscaling:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is not above max_replicas")
        return self


class PlacementSpec(_Part):
    """What an entry says of its place in a cluster.

    Attributes:
        group: services of one group run in the same processes; empty for a group of its own.
        replicas: how many processes there are of the group; None where nothing is said.
        autoscaling: how their number follows the load, in place of ``replicas``.
        num_cpus: the cores that a replica asks the cluster for.
        resources: what else it asks for, by name.
        max_ongoing_requests: what a replica is given at once; others wait where they come from.
    """

    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]*$", max_length=200)] = ""
    replicas: Replicas | None = None
    autoscaling: Autoscaling | None = None
    num_cpus: Annotated[float, Field(ge=0)] | None = None
    resources: dict[str, Annotated[float, Field(ge=0)]] | None = None
    max_ongoing_requests: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_number(self) -> PlacementSpec:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("either replicas or autoscaling, and not both")
        return self


def read_placement(value: Any, key: str = "placement") -> tuple[PlacementSpec, tuple[Problem, ...]]:
    """Read what an entry says: a group's name, or an object; where something is wrong, all of that."""
    try:
        return PlacementSpec.model_validate({"group": value} if isinstance(value, str) else value), ()
    except ValidationError as error:
        return PlacementSpec(), tuple(
            Problem(
                "the value cannot be used",
                path=".".join([key, *map(str, fault["loc"])]),
                expected=f"a key of {', '.join(PlacementSpec.model_fields)}"
                if fault["type"] == "extra_forbidden"
                else expected_by(fault),
                found=shown(fault["input"]),
            )
            for fault in error.errors(include_url=False)
        )
