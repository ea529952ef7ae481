"""Cluster layout: groups of services, ordered by their calls.

::

    entries ── placement ──> groups ── calls ──> order, callees first
                               └── several groups: an ingress group in front
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

# ----------------------------------------------------------------------
# Which services of a configuration run together, and which groups call each other
# ----------------------------------------------------------------------

INGRESS: Final = "ingress"
"""Group with the public endpoints, if there are several groups; it may have services too."""


@dataclass(frozen=True, slots=True)
class ServiceGroup:
    """Services that share processes.

    Attributes:
        called: called services of other groups, with the names of their groups.
    """

    name: str
    services: tuple[ServableSpec, ...]
    placement: PlacementSpec
    called: dict[str, str]

    @property
    def has_sequences(self) -> bool:
        """True if the group has stateful models."""
        return any(_has_sequences(service) for service in self.services)

    def is_repeatable(self, kinds: Kinds) -> bool:
        """Return whether a call with unknown outcome may be repeated."""
        # A remote model may be a graph or stateful.
        is_unknown = any(isinstance(service, RemoteSpec) for service in self.services)
        runs_user_code = any(kinds[service.kind].runs_user_code for service in self.services)
        return not (self.has_sequences or is_unknown or runs_user_code)

    @property
    def shards(self) -> int:
        """Number of shards, each with one replica and its own sequence ids."""
        return (self.placement.replicas or 1) if self.has_sequences else 1


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Groups of a configuration, callees first; the last one has the public endpoints."""

    groups: tuple[ServiceGroup, ...]

    @property
    def ingress(self) -> ServiceGroup:
        """The group with the public endpoints."""
        return self.groups[-1]

    @property
    def owners(self) -> dict[str, str]:
        """Group name by service name."""
        return {service.name: group.name for group in self.groups for service in group.services}


def shard_names(group: str, shards: int) -> list[str]:
    """Return the names of a group's shards; a single shard has the group's name."""
    return [group] if shards == 1 else [f"{group}-{shard}-of-{shards}" for shard in range(shards)]


def make_layout(spec: ServerSpec, kinds: Kinds) -> ClusterLayout:
    """Return the groups of a configuration; blocking, as graph files are read.

    Raises:
        ConfigError: a cluster cannot serve the configuration, with all problems.
    """
    problems = [problem for service in spec.services for problem in service.errors]
    if not spec.services:
        problems.append(Problem("nothing is configured", suggestion="configure at least one service"))
    members: dict[str, list[ServableSpec]] = {}
    for service in spec.services:
        members.setdefault(service.placement.group or service.name, []).append(service)
    owners = {service.name: name for name, services in members.items() for service in services}
    placements = {name: _merge_placements(name, services, problems) for name, services in members.items()}
    calls = {name: _called_services(name, services, owners, kinds, problems) for name, services in members.items()}
    for name, services in members.items():
        problems += _replica_problems(name, services, placements[name])
    order = _order_groups(calls, problems)
    if problems:
        raise ConfigError(problems)
    groups = {name: ServiceGroup(name, tuple(members[name]), placements[name], calls[name]) for name in order}
    if len(groups) > 1 or any(group.shards > 1 for group in groups.values()):
        own = groups.pop(INGRESS, ServiceGroup(INGRESS, (), PlacementSpec(), {}))
        groups[INGRESS] = own
    return ClusterLayout(tuple(groups.values()))


def _merge_placements(name: str, services: Sequence[ServableSpec], problems: list[Problem]) -> PlacementSpec:
    merged: dict[str, Any] = {}
    for service in services:
        for key in service.placement.model_fields_set - {"group"}:
            value = getattr(service.placement, key)
            if merged.setdefault(key, value) != value:
                text = f'conflicting {key} in group "{name}"'
                problems.append(service.placed(Problem(text, path=f"placement.{key}", suggestion="set it once")))
    if merged.get("replicas") is not None and merged.get("autoscaling") is not None:
        text = f'group "{name}" has both replicas and autoscaling'
        problems.append(services[0].placed(Problem(text, path="placement", suggestion="remove one of them")))
        del merged["autoscaling"]
    return PlacementSpec(**merged)


def _called_services(
    name: str, services: Sequence[ServableSpec], owners: dict[str, str], kinds: Kinds, problems: list[Problem]
) -> dict[str, str]:
    called: dict[str, str] = {}
    for service in services:
        for dependency in kinds[service.kind].depends_on(service):
            owner = owners.get(dependency.name)
            if owner is None or owner == name:
                continue
            if owner == INGRESS:
                text = f'"{service.name}" calls "{dependency.name}", which is in the ingress group'
                suggestion = "place both there, or both elsewhere"
                problems.append(service.placed(Problem(text, path="placement", suggestion=suggestion)))
            called[dependency.name] = owner
    return called


def _has_sequences(service: ServableSpec) -> bool:
    return isinstance(service, ModelSpec) and service.stateful


def _replica_problems(name: str, services: Sequence[ServableSpec], placement: PlacementSpec) -> Iterator[Problem]:
    is_several = (placement.replicas or 1) > 1 or placement.autoscaling is not None
    is_mixed = name == INGRESS or not all(map(_has_sequences, services))
    for service in services:
        if is_several and _has_sequences(service) and (is_mixed or placement.autoscaling is not None):
            text = f'"{service.name}" has sequences, which require a fixed number of replicas'
            suggestion = 'use a separate group with "replicas"'
            yield service.placed(Problem(text, path="placement", suggestion=suggestion))
        if is_several and service.max_concurrency:
            text = f'"{service.name}" has max_concurrency, which is not supported with several replicas'
            suggestion = "set max_ongoing_requests in its placement (per replica)"
            yield service.placed(Problem(text, path="max_concurrency", suggestion=suggestion))


def _order_groups(calls: dict[str, dict[str, str]], problems: list[Problem]) -> list[str]:
    ordered: list[str] = []
    left = dict(calls)
    while left:
        ready = [name for name, called in left.items() if not set(called.values()) & left.keys()]
        if not ready:
            names = ", ".join(sorted(left))
            suggestion = "place them in one group"
            problems.append(Problem(f"cyclic calls between groups: {names}", suggestion=suggestion))
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
    """Return the drain time of a group in seconds, from the drain times of the groups that it calls.

    All groups are replaced at the same time.  What has been asked of a group with one replica waits there until the
    old one has ended and a new one has started, and so does the caller that has asked, which must not be killed before.
    """
    return max((each + _START_SECONDS for each in callees), default=_OWN_SECONDS)
