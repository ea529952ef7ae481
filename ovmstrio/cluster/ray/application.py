"""Ray Serve application of a configuration: one deployment per group and shard."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import LocalityMixin, RequestRouter

from ovmstrio.cluster.layout import INGRESS, drain_seconds, make_layout, shard_names
from ovmstrio.cluster.ray.controller import desired_replicas, replica_of
from ovmstrio.cluster.ray.group_server import ReplicaPlan
from ovmstrio.cluster.ray.ingress import ClusterIngress
from ovmstrio.cluster.ray.replica import GroupReplica
from ovmstrio.config.config_file import parse_config
from ovmstrio.config.documents import to_short_json
from ovmstrio.config.schema import expected_text
from ovmstrio.config.specs import PlacementSpec, read_placement
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.kinds import KINDS
from ovmstrio.server.settings import ServerSettings
from ovmstrio.util.deprecation import rename_settings
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application
    from ray.serve.request_router import PendingRequest, RunningReplica

    from ovmstrio.cluster.layout import ClusterLayout
    from ovmstrio.config.specs import Autoscaling

# Request router

_PUSH_METHOD: Final = "push_to_stream"


class StreamRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # Ray is not installed in type checks
    """Power-of-two-choices router with locality; Ray runs it in every calling process."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidate replicas; Ray picks the one with the shortest queue."""
        if pending_request is not None and pending_request.metadata.call_method == _PUSH_METHOD:
            wanted = replica_of(pending_request.args[0])
            owner = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
            # Any other replica reports that it does not have the stream.
            return [owner or candidate_replicas[:1]]
        near = self.apply_locality_routing(pending_request=pending_request)
        chosen = random.sample(list(near), min(2, len(near)))
        return [[self.curr_replicas[each] for each in chosen if each in self.curr_replicas]]


# Application

GRPC_SERVICERS: Final = ["ovmstrio.cluster.ray.grpc_services.add_services"]
"""Servicer functions for Ray's gRPC proxies."""

_SINGLE_LOOP_ENV: Final = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Ray runs user code in a separate thread by default; nothing blocks here, and trio runs in the loop's thread."""
_DEFAULT_ONGOING_REQUESTS: Final = 100
SETTINGS: Final = frozenset(
    {
        "cache_dir",
        "custom_node_isolation",
        "file_system_poll_wait_seconds",
        "hide_errors",
        "max_message_size",
        "openai_errors",
        "python_isolation",
        "python_memory_limit",
        "queue_timeout",
        "sequence_store",
        "sequence_flush_seconds",
        "sse_keep_alive_interval",
        "server_name",
        "crash_probe",
    }
)
"""Server settings for replicas: no ports, TLS, authentication or logs."""
PATHS: Final = frozenset({"cache_dir", "sequence_store"})
"""Settings that are paths, equal on all machines."""


class ClusterSettings(BaseModel):
    """Arguments of an application.

    Attributes:
        config: configuration file; it and all its files have the same paths on all machines.
        ingress: placement of an ingress group without entries.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: Path
    settings: dict[str, Any] = {}
    ingress: PlacementSpec = PlacementSpec()


def application(args: Mapping[str, Any]) -> Application:
    """Return the application of a configuration, given members of :class:`ClusterSettings`; blocking.

    Use as ``import_path`` in Ray Serve configuration files.

    Raises:
        ConfigError: a cluster cannot serve the configuration, with all problems.
    """
    given = _read_args(args)
    settings = _read_settings(given.settings)
    path = given.config.absolute()
    try:
        content = read_regular_bytes(path)
    except OSError as error:
        raise ConfigError([Problem(f"the file cannot be read: {error.strerror}", str(path))]) from None
    layout = make_layout(parse_config(KINDS.values(), content, path, cache_dir=settings.get("cache_dir")), KINDS)
    _check_ingress(given.ingress, layout)
    repeatable = [group.name for group in layout.groups if group.is_repeatable(KINDS)]
    shards = {group.name: group.shards for group in layout.groups if group.shards > 1}
    bound: dict[str, dict[str, Application]] = {}
    drains: dict[str, int] = {}
    for group in layout.groups:
        is_ingress = group is layout.ingress
        callees = [other for other in bound if is_ingress or other in group.called.values()]
        handles = {name: app for other in callees for name, app in bound[other].items()}
        owners = layout.owners if is_ingress and len(layout.groups) > 1 else {}
        placement = given.ingress if is_ingress and not group.services else group.placement
        bound[group.name] = {}
        drain = drains[group.name] = drain_seconds(drains[each] for each in callees)
        kind = ClusterIngress if is_ingress else GroupReplica
        for name in shard_names(group.name, group.shards):
            target = placement.autoscaling.target_waiting_requests if placement.autoscaling else None
            # Requests of a stream use additional calls, which must not wait for other streams to end.
            streams = (placement.max_ongoing_requests or _DEFAULT_ONGOING_REQUESTS) // 2
            plan = ReplicaPlan(name, group.services, group.called, owners, settings, shards, target, streams)
            deployment = _deployment(name, placement, kind, group.shards, drain)
            bound[group.name][name] = deployment.bind(plan, handles, repeatable)
    return bound[layout.ingress.name][layout.ingress.name]


def _read_args(args: Mapping[str, Any]) -> ClusterSettings:
    ingress, problems = read_placement(args.get("ingress", {}), INGRESS)
    try:
        given = ClusterSettings.model_validate({**args, "ingress": ingress})
    except ValidationError as error:
        problems = (
            *problems,
            *_problems_of(error, ClusterSettings, f"one of {', '.join(ClusterSettings.model_fields)}"),
        )
    if problems:
        raise ConfigError(problems)
    return given


def _read_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Return the validated settings with absolute paths."""
    given = rename_settings(given)
    unknown = sorted(given.keys() - SETTINGS)
    if unknown:
        text = f"settings not supported in a replica: {', '.join(unknown)}"
        raise ConfigError([Problem(text, path="settings", expected=f"some of {', '.join(sorted(SETTINGS))}")])
    try:
        read = ServerSettings(**given)
    except ValidationError as error:
        raise ConfigError(_problems_of(error, ServerSettings, "", "settings")) from None
    return given | {name: getattr(read, name).absolute() for name in PATHS & given.keys() if getattr(read, name)}


def _problems_of(error: ValidationError, schema: type, known: str, *place: str) -> list[Problem]:
    return [
        Problem(
            "the value cannot be used",
            path=".".join([*place, *map(str, fault["loc"])]),
            expected=known if fault["type"] == "extra_forbidden" else expected_text(fault, schema),
            found=to_short_json(fault["input"]),
        )
        for fault in error.errors(include_url=False)
    ]


def _check_ingress(placement: PlacementSpec, layout: ClusterLayout) -> None:
    group = layout.ingress
    if not placement.model_fields_set:
        return
    if placement.group not in {"", INGRESS}:
        text = f'the ingress group must be named "{INGRESS}"'
        raise ConfigError([Problem(text, path=f"{INGRESS}.group", found=placement.group)])
    if group.services:
        text = f'the ingress group "{group.name}" has services, whose entries set its placement'
        suggestion = f'set the "placement" of "{group.services[0].name}"'
        raise ConfigError([Problem(text, path=INGRESS, suggestion=suggestion)])


def _deployment(name: str, placement: PlacementSpec, replica: type[GroupReplica], shards: int, drain: int) -> Any:
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": placement.max_ongoing_requests or _DEFAULT_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": drain,
        "ray_actor_options": {
            "num_cpus": 1 if placement.num_cpus is None else placement.num_cpus,
            "resources": placement.resources or {},
            "runtime_env": {"env_vars": _SINGLE_LOOP_ENV},
        },
    }
    is_several = placement.autoscaling is not None or (placement.replicas or 1) > 1
    if is_several and shards == 1 and replica is not ClusterIngress:
        options["request_router_config"] = RequestRouterConfig(request_router_class=StreamRouter)
    if placement.autoscaling is None:
        options["num_replicas"] = 1 if shards > 1 else placement.replicas or 1
    else:
        options["autoscaling_config"] = _autoscaling(placement.autoscaling)
    return serve.deployment(**options)(replica)


def _autoscaling(spec: Autoscaling) -> dict[str, Any]:
    config = spec.model_dump(exclude={"target_waiting_requests"})
    if spec.target_waiting_requests is not None:
        config["policy"] = {"policy_function": desired_replicas}
    return config
