"""Configuration file ``config.yml`` of an Op pipeline: reading, overrides, validation and Op settings."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from ovmstrio.config.documents import Findings, InvalidSyntax, Located, with_paths
from ovmstrio.config.schema import Reader
from ovmstrio.config.yaml_documents import load_yaml, parse_yaml
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.settings import OpSettings, PipelineSettings

if TYPE_CHECKING:
    from collections.abc import Collection

    from ovmstrio.ops.op import Op

# Documents and overrides

_SCALARS: Final = (
    "concurrency", "timeout", "batch_size", "auto_batching_timeout", "client_type", "client_config",
)  # fmt: skip


def resolve_op_settings(op: Op, settings: PipelineSettings) -> OpSettings:
    """Return an Op's settings: constructor over ``local_service_conf`` over Op keys; raises ConfigError."""
    given = _constructor_settings(op)
    resolved = replace(settings.op(op.name), **given)
    if resolved.server_endpoints or resolved.local_service_conf.model_config is None:
        return resolved
    return _merge_local(resolved, given)


def _constructor_settings(op: Op) -> dict[str, Any]:
    arguments: dict[str, Any] = {key: value for key in _SCALARS if (value := getattr(op, key)) is not None}
    if op.retry:
        arguments["retry"] = op.retry
    if op.server_endpoints:
        arguments["server_endpoints"] = op.server_endpoints
    if op.fetch_list is not None:
        arguments["fetch_list"] = op.fetch_list
    if op.local_service_handler is not None:
        arguments["local_service_conf"] = op.local_service_handler.conf
    reader = Reader(Findings(""))
    given = reader.values(with_paths(arguments), OpSettings)
    if reader.findings.fatal:
        raise ConfigError(
            [
                replace(each, message=f"argument {each.path} of Op {op.name} is invalid", path="")
                for each in reader.findings.fatal
            ]
        )
    return given


def _merge_local(settings: OpSettings, given: dict[str, Any]) -> OpSettings:
    local = settings.local_service_conf
    merged: dict[str, Any] = {}
    for key in ("fetch_list", "client_type"):
        inner = getattr(local, key)
        merged[key] = getattr(settings, key) if key in given or inner is None else inner
    return replace(settings, **merged, local_service_conf=replace(local, **merged))


CONFIG_VARIABLE: Final = "OVMS_PIPELINE_CONFIG"
"""Environment variable with a configuration file for ``ArgsParser``."""


def read_document(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Located, Findings]:
    """Read a configuration and apply overrides such as ``op.uci.concurrency=2``; blocking; raises ConfigError."""
    if isinstance(source, Path):
        root, findings = _read_file(source)
    else:
        root, findings = with_paths(source), Findings("yml_dict")
    options = [_option(text) for text in overrides]
    problems = [option for option in options if isinstance(option, Problem)]
    if problems:
        raise ConfigError(problems)
    for option in options:
        if not isinstance(option, Problem):
            root = _merge(root, option)
    return root, findings


def conf_dict(source: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return a file with overrides as a plain dictionary; blocking; raises ConfigError."""
    root, _ = read_document(source, overrides)
    plain: dict[str, Any] = root.plain()
    return plain


def _read_file(path: Path) -> tuple[Located, Findings]:
    findings, document = Findings(str(path)), load_yaml(path, "")
    findings.refuse_repeated(document, " in one mapping")
    root = document.root if document.root.value is not None else replace(document.root, value={})
    if not Reader(findings, is_yaml=True).is_mapping(root):
        raise ConfigError(findings.fatal)
    return root, findings


def _option(text: str) -> Located | Problem:
    key, equals, value = text.strip().partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        return Problem("malformed option", path=text, expected="key.key=value", found=text)
    try:
        plain = parse_yaml(value).root.plain()
    except InvalidSyntax as error:
        return Problem(f"option value is not YAML: {error.message}", path=key, found=value)
    for step in reversed(steps):
        plain = {step: plain}
    return with_paths(plain)


def _merge(under: Located, over: Located) -> Located:
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    members = dict(under.value)
    for key, each in over.value.items():
        members[key] = _merge(members[key], each) if key in members else each
    return replace(under, value=members)


# Settings

_LAST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a pipeline; 0 lets the system choose, None disables HTTP."""

    rpc: int
    http: int | None


def choose_ports(rpc_port: int | None, http_port: int | None, own: Collection[int] = ()) -> Ports:
    """Return the ports of a configuration; raises ConfigError if both are missing or one is in use.

    ``http_port`` alone gives gRPC the next free port above; ``rpc_port`` alone disables HTTP.  Ports that this process
    listens on already (``own``) are free.
    """
    if rpc_port is None and http_port is None:
        suggestion = "set at least one, such as `http_port: 9999`"
        raise ConfigError([Problem("rpc_port and http_port are both missing", suggestion=suggestion)])
    named = (("rpc_port", rpc_port), ("http_port", http_port))
    hint = "choose another port, or stop its program"
    taken = [
        Problem(f"port {port} is in use", path=key, suggestion=hint)
        for key, port in named
        if port is not None and port not in own and not is_port_free(port)
    ]
    if taken:
        raise ConfigError(taken)
    return Ports(_next_free(http_port or 0, own) if rpc_port is None else rpc_port, http_port)


def is_port_free(port: int) -> bool:
    """Return whether a port is free on all addresses; 0 is always free."""
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_ipv6 else [])]
    return all(_can_bind(family, port) for family in families)


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # this machine lacks the address family
    with closing(probe):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            # IPv6 is switched off, which says nothing about the port.
            return family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL
    return True


def _next_free(above: int, own: Collection[int]) -> int:
    for port in range(above + 1, _LAST_PORT + 1):
        if port in own or is_port_free(port):
            return port
    message = f"no port above {above} is free for gRPC"
    raise ConfigError([Problem(message, path="rpc_port", suggestion="set `rpc_port`")])


_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ValidatedConfig:
    """Configuration with all its findings.

    Attributes:
        settings: the settings, with defaults for invalid values.
        problems: all problems in line order.
        without_effect: reasons by path of each key without effect.
    """

    settings: PipelineSettings
    problems: tuple[Problem, ...]
    without_effect: Mapping[str, str]
    _root: Located
    _findings: Findings

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Problems of severity "error"."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def place(self, problem: Problem) -> Problem:
        """Add file and line to a problem with a path; other problems are returned unchanged."""
        if problem.file or not problem.path:
            return problem
        return self._findings.place(self._root, problem)


def read_pipeline_config(
    yml_file: str | Path | None = None,
    yml_dict: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> PipelineSettings:
    """Read ``config.yml`` or an equivalent dictionary with overrides such as ``op.uci.concurrency=2``; blocking.

    Logs unknown keys as warnings and keys without effect at debug level.  Raises ConfigError for invalid content.
    """
    examined = validate_pipeline_config(yml_file, yml_dict, overrides)
    if examined.errors:
        raise ConfigError(examined.errors)
    for problem in examined.problems:
        _log.warning("configuration", problem=str(problem))
    for key, reason in examined.without_effect.items():
        _log.debug("key without effect", key=key, reason=reason)
    return examined.settings


def validate_pipeline_config(
    yml_file: str | Path | None = None,
    yml_dict: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> ValidatedConfig:
    """Read like :func:`read_pipeline_config`, but return the problems with the settings; ConfigError if unreadable."""
    if (yml_file is None) == (yml_dict is None):
        raise ConfigError([Problem("expected exactly one of yml_file and yml_dict")])
    source = Path(yml_file) if yml_file is not None else yml_dict or {}
    root, findings = read_document(source, overrides)
    reader = Reader(findings, is_yaml=True)
    settings = reader.read(root, PipelineSettings)
    assert settings is not None  # noqa: S101 - no key is required
    ops = {name: replace(op, name=name) for name, op in settings.ops.items()}
    settings = replace(settings, ops=ops, source=source if isinstance(source, Path) else None)
    _check_ports(root, settings, findings)
    return ValidatedConfig(settings, findings.all, reader.without_effect, root, findings)


def _check_ports(root: Located, settings: PipelineSettings, findings: Findings) -> None:
    dag, port = root.find("dag"), root.find("dag", "prometheus_port")
    has_port = "prometheus_port" in dag.members and port.value is not None
    if all(each.value is None for key, each in root.members.items() if key in {"rpc_port", "http_port"}):
        findings.refuse(root, "rpc_port and http_port are both missing", suggestion="set one of them, or both")
    taken, hint = f"port {settings.rpc_port} is already rpc_port", "use another port"
    if settings.rpc_port and settings.rpc_port == settings.http_port:
        findings.refuse(root.find("http_port"), taken, suggestion=hint)
    if settings.rpc_port and settings.rpc_port == settings.dag.prometheus_port:
        findings.refuse(port, taken, suggestion=f"{hint}, or the http_port")
    if settings.dag.enable_prometheus and not has_port:
        message = "no prometheus_port: metrics are served only at /metrics of http_port"
        findings.warn(dag.find("enable_prometheus"), message)
    if has_port and not settings.dag.enable_prometheus:
        findings.warn(port, "prometheus_port has no effect without enable_prometheus")
