"""What an entry of any list may say, whatever kind of service it configures: how many calls it takes, where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import Field

from ovmstrio.config.documents import OPTIONAL, Schema
from ovmstrio.config.placement import read_placement
from ovmstrio.core.errors import Problem

if TYPE_CHECKING:
    from ovmstrio.config.findings import Findings
    from ovmstrio.config.specs import ServableSpec

__all__ = ["ServiceEntry", "with_limits"]

SpecT = TypeVar("SpecT", bound="ServableSpec")


class ServiceEntry(Schema):
    """The keys that entries of all kinds have."""

    max_concurrency: Annotated[int, Field(ge=0)] = OPTIONAL
    max_queue: Annotated[int, Field(ge=0)] = OPTIONAL
    placement: str | dict[str, Any] = OPTIONAL


_LIMITS: Final = ("max_concurrency", "max_queue")
_PLACEMENT: Final = "placement"


def with_limits(spec: SpecT, findings: Findings) -> SpecT:
    """Give a spec the limits and the place that its entry says, which has been checked."""
    if spec.place is None or not isinstance(spec.place.settings.value, dict):
        return spec
    entry = spec.place.settings.value
    given: dict[str, Any] = {key: entry[key].value for key in _LIMITS if key in entry and type(entry[key].value) is int}
    if "max_queue" in given and not given.get("max_concurrency") and not spec.queues_itself:
        problem = Problem(
            "the limit has no effect: any number of calls may be under way, so that none waits",
            path="max_queue",
            suggestion="set max_concurrency as well",
            severity="warning",
        )
        findings.problems.append(spec.place.of(problem))
    if _PLACEMENT in entry:
        given["placement"], problems = read_placement(entry[_PLACEMENT].plain())
        if problems:
            given["problems"] = (*spec.problems, *map(spec.place.of, problems))
    return spec.model_copy(update=given) if given else spec
