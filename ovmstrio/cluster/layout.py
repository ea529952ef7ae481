"""Which services of a configuration run together, and which groups call each other.

::

    entries ── placement ──> groups ── what they call ──> order, the callee before its caller
                                └── several? a group in front of them, which has the doors: the ingress
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ovmstrio.config.remote_entries import RemoteSpec
from ovmstrio.config.specs import ModelSpec, PlacementSpec
from ovmstrio.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ovmstrio.config.specs import ServableSpec, ServerSpec
    from ovmstrio.server.kinds import Kinds

__all__ = ["INGRESS", "ClusterLayout", "ServiceGroup", "drain_seconds", "lay_out", "shard_names"]

# ----------------------------------------------------------------------
# Which services of a configuration run together, and which groups call each other
# ----------------------------------------------------------------------

INGRESS: Final = "ingress"
"""The group that has the doors, where there are several; services may be placed there, too."""


@dataclass(frozen=True, slots=True)
class ServiceGroup:
    """Services that run in the same processes.

    Attributes:
        name: of the group.
        services: that are in it.
        placement: what its entries say of it together.
        called: services of other groups that it calls, with the names of their groups.
    """

    name: str
    services: tuple[ServableSpec, ...]
    placement: PlacementSpec
    called: dict[str, str]

    @property
    def has_sequences(self) -> bool:
        """Whether steps of sequences come to it."""
        return any(_has_sequences(service) for service in self.services)

    def is_repeatable(self, kinds: Kinds) -> bool:
        """Tell whether a call may be made once more of which nobody knows how far it came."""
        # What a model of another server is there is not known here: it may be a graph, or have sequences.
        is_unknown = any(isinstance(service, RemoteSpec) for service in self.services)
        runs_user_code = any(kinds[service.kind].runs_user_code for service in self.services)
        return not (self.has_sequences or is_unknown or runs_user_code)

    @property
    def shards(self) -> int:
        """How many parts it has, of which each has the sequences whose ids are its own, and one replica."""
        return (self.placement.replicas or 1) if self.has_sequences else 1


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """A configuration as groups, each behind those that it calls; the last one has the doors."""

    groups: tuple[ServiceGroup, ...]

    @property
    def ingress(self) -> ServiceGroup:
        """The group that has the doors: the only one, or the one in front of all others."""
        return self.groups[-1]

    @property
    def owners(self) -> dict[str, str]:
        """The group of each service, by its name."""
        return {service.name: group.name for group in self.groups for service in group.services}


def shard_names(group: str, shards: int) -> list[str]:
    """Name the parts of a group; of one with a single part it is the group's name."""
    return [group] if shards == 1 else [f"{group}-{shard}-of-{shards}" for shard in range(shards)]


def lay_out(spec: ServerSpec, kinds: Kinds) -> ClusterLayout:
    """Make groups of a configuration; blocking, for it reads what services call.

    Raises:
        ConfigError: it cannot be served by a cluster; all that is in the way is told.
    """
    problems = [problem for service in spec.services for problem in service.errors]
    if not spec.services:
        problems.append(Problem("nothing is configured", suggestion="a cluster needs at least one service"))
    members: dict[str, list[ServableSpec]] = {}
    for service in spec.services:
        members.setdefault(service.placement.group or service.name, []).append(service)
    owners = {service.name: name for name, services in members.items() for service in services}
    placements = {name: _merged(name, services, problems) for name, services in members.items()}
    calls = {name: _called(name, services, owners, kinds, problems) for name, services in members.items()}
    for name, services in members.items():
        problems += _objections(name, services, placements[name])
    order = _ordered(calls, problems)
    if problems:
        raise ConfigError(problems)
    groups = {name: ServiceGroup(name, tuple(members[name]), placements[name], calls[name]) for name in order}
    if len(groups) > 1 or any(group.shards > 1 for group in groups.values()):
        own = groups.pop(INGRESS, ServiceGroup(INGRESS, (), PlacementSpec(), {}))
        groups[INGRESS] = own
    return ClusterLayout(tuple(groups.values()))


def _merged(name: str, services: Sequence[ServableSpec], problems: list[Problem]) -> PlacementSpec:
    """Put together what the entries of a group say of it, which may not differ."""
    said: dict[str, Any] = {}
    for service in services:
        for key in service.placement.model_fields_set - {"group"}:
            value = getattr(service.placement, key)
            if said.setdefault(key, value) != value:
                text = f'the group "{name}" is given another {key} by another of its entries'
                problems.append(service.placed(Problem(text, path=f"placement.{key}", suggestion="say it once")))
    if said.get("replicas") is not None and said.get("autoscaling") is not None:
        text = f'the group "{name}" is given both a number of replicas and autoscaling'
        problems.append(services[0].placed(Problem(text, path="placement", suggestion="remove one of them")))
        del said["autoscaling"]
    return PlacementSpec(**said)


def _called(
    name: str, services: Sequence[ServableSpec], owners: dict[str, str], kinds: Kinds, problems: list[Problem]
) -> dict[str, str]:
    """Tell what a group calls of others, which have to take tensors: that is what goes from group to group."""
    called: dict[str, str] = {}
    for service in services:
        for dependency in kinds[service.kind].depends_on(service):
            owner = owners.get(dependency.name)
            if owner is None or owner == name:
                continue
            if owner == INGRESS:
                text = f'"{service.name}" calls "{dependency.name}", which is in the group that has the doors'
                suggestion = "put both there, or both into others"
                problems.append(service.placed(Problem(text, path="placement", suggestion=suggestion)))
            called[dependency.name] = owner
    return called


def _has_sequences(service: ServableSpec) -> bool:
    return isinstance(service, ModelSpec) and service.stateful


def _objections(name: str, services: Sequence[ServableSpec], placement: PlacementSpec) -> Iterator[Problem]:
    """Tell what cannot run in several processes."""
    is_several = (placement.replicas or 1) > 1 or placement.autoscaling is not None
    is_mixed = name == INGRESS or not all(map(_has_sequences, services))
    for service in services:
        if is_several and _has_sequences(service) and (is_mixed or placement.autoscaling is not None):
            text = f'"{service.name}" has sequences, which are shared out among a fixed number of replicas by their ids'
            suggestion = 'give it a group of its own, with "replicas"'
            yield service.placed(Problem(text, path="placement", suggestion=suggestion))
        if is_several and service.max_concurrency:
            text = f'"{service.name}" has a max_concurrency, which one process counts, and its group several replicas'
            suggestion = "say max_ongoing_requests in its placement, which is counted for each replica"
            yield service.placed(Problem(text, path="max_concurrency", suggestion=suggestion))


def _ordered(calls: dict[str, dict[str, str]], problems: list[Problem]) -> list[str]:
    """Order groups so that each comes behind those that it calls; circles are problems."""
    ordered: list[str] = []
    left = dict(calls)
    while left:
        ready = [name for name, called in left.items() if not set(called.values()) & left.keys()]
        if not ready:
            names = ", ".join(sorted(left))
            suggestion = "put what calls each other into one group, by placement"
            problems.append(Problem(f"groups call each other in a circle: {names}", suggestion=suggestion))
            return ordered
        for name in ready:
            ordered.append(name)
            del left[name]
    return ordered


# ----------------------------------------------------------------------
# How long a replica that is replaced may take to finish what it has, before Ray kills it
# ----------------------------------------------------------------------

_OWN_SECONDS: Final = 30
_START_SECONDS: Final = 120


def drain_seconds(callees: Iterable[int]) -> int:
    """Give the time of a group, in seconds, by those of the groups that it calls.

    All groups are replaced at the same time.  What has been asked of a group with one replica waits there until the
    old one has ended and a new one has started, and so does the caller that has asked, which must not be killed before.
    """
    return max((each + _START_SECONDS for each in callees), default=_OWN_SECONDS)
