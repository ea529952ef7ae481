"""``config.yml`` as settings: every problem of it is told at once, with its line and the way out."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from ovmstrio.config.documents import Findings, InvalidSyntax, Located, load_yaml, locate, parse_yaml, shown
from ovmstrio.config.sections import Section, Unusable, rules_of, whole
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.settings import (
    DagSettings,
    LocalServiceConf,
    LoggingSettings,
    OpSettings,
    PipelineSettings,
    TracerSettings,
)

__all__ = [
    "CONFIG_VARIABLE",
    "TOP_RULES",
    "ExaminedConfig",
    "Ports",
    "choose_ports",
    "conf_dict",
    "examine_pipeline_config",
    "is_free",
    "read_document",
    "read_pipeline_config",
    "settings_of",
]

# ----------------------------------------------------------------------
# The text of ``config.yml`` as located values: a file, or a dictionary, with options put over it
# ----------------------------------------------------------------------

_SCALARS: Final = (
    "concurrency", "timeout", "batch_size", "auto_batching_timeout", "client_type", "client_config",
)  # fmt: skip


class ConstructorArguments(Protocol):
    """What an Op's constructor was given: None, and 0 for ``retry``, for what it was not."""

    @property
    def name(self) -> str:
        """The Op's name, under which ``config.yml`` has its entry."""
        ...

    @property
    def server_endpoints(self) -> Sequence[str] | None:
        """Where its model is served elsewhere."""
        ...

    @property
    def fetch_list(self) -> Sequence[str] | None:
        """The outputs that are wanted."""
        ...

    @property
    def retry(self) -> int | None:
        """How often ``process`` is tried in all."""
        ...


def settings_of(op: ConstructorArguments, settings: PipelineSettings) -> OpSettings:
    """Give what holds for an Op; ``fetch_list`` and ``client_type`` are those of the place where its model is.

    The block ``local_service_conf`` says more of a model of this process than the Op's own keys do, but less than the
    constructor.

    Raises:
        ConfigError: an argument is of a wrong type or out of bounds; every one is listed.
    """
    given = _given(op)
    resolved = replace(settings.op(op.name), **given)
    if resolved.server_endpoints or resolved.local_service_conf.model_config is None:
        return resolved
    return _with_local(resolved, given)


def _given(op: ConstructorArguments) -> dict[str, Any]:
    arguments: dict[str, Any] = {key: value for key in _SCALARS if (value := getattr(op, key)) is not None}
    if op.retry:
        arguments["retry"] = op.retry
    if op.server_endpoints:
        arguments["server_endpoints"] = op.server_endpoints
    if op.fetch_list is not None:
        arguments["fetch_list"] = op.fetch_list
    problems, given = [], {}
    for key, value in arguments.items():
        try:
            given[key] = rules_of(OpSettings)[key](locate(value))
        except Unusable as error:
            message = f"argument {key} of Op {op.name} cannot be used"
            problem = Problem(message, expected=error.expected, found=shown(value), suggestion=error.suggestion)
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return given


def _with_local(settings: OpSettings, given: dict[str, Any]) -> OpSettings:
    """Make the Op's keys and those of ``local_service_conf`` say the same."""
    local = settings.local_service_conf
    said: dict[str, Any] = {}
    for key in ("fetch_list", "client_type"):
        inner = getattr(local, key)
        said[key] = getattr(settings, key) if key in given or inner is None else inner
    return replace(settings, **said, local_service_conf=replace(local, **said))


CONFIG_VARIABLE: Final = "OVMS_PIPELINE_CONFIG"
"""The environment variable that names a configuration for ``ArgsParser``."""


def read_document(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Located, Findings]:
    """Read a configuration, and put options such as ``op.uci.concurrency=2`` over it; blocking where it is a file.

    Raises:
        ConfigError: the file cannot be read, is no YAML or no mapping, or an option is not of that form.
    """
    if isinstance(source, Path):
        root, findings = _read_file(source)
    else:
        root, findings = locate(source), Findings("yml_dict")
    options = [_option(text) for text in overrides]
    problems = [option for option in options if isinstance(option, Problem)]
    if problems:
        raise ConfigError(problems)
    for option in options:
        if not isinstance(option, Problem):
            root = _merge(root, option)
    return root, findings


def conf_dict(source: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Give a file with options put over it as a plain dictionary; blocking.

    Raises:
        ConfigError: as :func:`read_document`.
    """
    root, _ = read_document(source, overrides)
    plain: dict[str, Any] = root.plain()
    return plain


def _read_file(path: Path) -> tuple[Located, Findings]:
    findings, document = Findings(str(path)), load_yaml(path, "")
    findings.refuse_repeated(document, " in one mapping")
    root = document.root if document.root.value is not None else replace(document.root, value={})
    if not isinstance(root.value, dict):
        findings.refuse(root, "wrong type", expected="a mapping of keys to values", found=shown(root.plain()))
        raise ConfigError(findings.fatal)
    return root, findings


def _option(text: str) -> Located | Problem:
    """Read ``k.k=v`` as the mappings that it stands for; the value is YAML."""
    key, equals, value = text.strip().partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        return Problem("the option cannot be used", path=text, expected="key.key=value", found=text)
    try:
        plain = parse_yaml(value).root.plain()
    except InvalidSyntax as error:
        return Problem(f"the option's value is not YAML: {error.message}", path=key, found=value)
    for step in reversed(steps):
        plain = {step: plain}
    return locate(plain)


def _merge(under: Located, over: Located) -> Located:
    """Put a mapping over another key by key; anything else takes the place of what was there."""
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    members = dict(under.value)
    for key, each in over.value.items():
        members[key] = _merge(members[key], each) if key in members else each
    return replace(under, value=members)


# ----------------------------------------------------------------------
# ``config.yml`` as settings: every problem of it is told at once, with its line and the way out
# ----------------------------------------------------------------------

_LAST_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a pipeline listens: ``rpc`` for gRPC, ``http`` for HTTP or None; 0 lets the system choose."""

    rpc: int
    http: int | None


def choose_ports(rpc_port: int | None, http_port: int | None) -> Ports:
    """Settle the ports of a configuration; blocking, but only for system calls.

    With ``http_port`` alone, gRPC gets the next port above that is free; with ``rpc_port`` alone there is no HTTP.

    Raises:
        ConfigError: neither port is given, or one that is given is in use.
    """
    if rpc_port is None and http_port is None:
        suggestion = "give at least one of them, such as `http_port: 9999`"
        raise ConfigError([Problem("rpc_port and http_port are both missing", suggestion=suggestion)])
    named = (("rpc_port", rpc_port), ("http_port", http_port))
    taken = [_in_use(key, port) for key, port in named if port is not None and not is_free(port)]
    if taken:
        raise ConfigError(taken)
    return Ports(_next_free(http_port or 0) if rpc_port is None else rpc_port, http_port)


def is_free(port: int) -> bool:
    """Tell whether nobody listens on a port of any address; 0 is always free."""
    families = [socket.AF_INET, *([socket.AF_INET6] if socket.has_ipv6 else [])]
    return all(_can_bind(family, port) for family in families)


def _can_bind(family: socket.AddressFamily, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return True  # a family that this machine does not have cannot be in anybody's way
    with closing(probe):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return _is_no_address(family, error)
    return True


def _is_no_address(family: socket.AddressFamily, error: OSError) -> bool:
    """Tell whether a bind failed because IPv6 is switched off, which says nothing of the port."""
    return family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL


def _next_free(above: int) -> int:
    for port in range(above + 1, _LAST_PORT + 1):
        if is_free(port):
            return port
    message = f"no port above {above} is free for gRPC"
    raise ConfigError([Problem(message, path="rpc_port", suggestion="give `rpc_port`")])


def _in_use(key: str, port: int) -> Problem:
    return Problem(
        f"port {port} is in use",
        path=key,
        suggestion="choose another, or end the program that has it",
    )


TOP_RULES: Final = {**rules_of(PipelineSettings), "grpc_gateway_port": whole()}
_WITHOUT_EFFECT: Final[Mapping[type, Mapping[str, str]]] = {
    PipelineSettings: {
        "grpc_gateway_port": "HTTP is served without a gateway",
        "build_dag_each_worker": "one process serves; `is_thread_op: false` gives the Ops processes of their own",
    },
    DagSettings: {"client_type": "each Op says how its model is reached"},
    LocalServiceConf: {
        "workdir": "no server is started for the model",
        "mem_optim": "OpenVINO reuses memory by itself",
        "ir_optim": "OpenVINO always optimises",
        "use_mkldnn": "OpenVINO runs on oneDNN",
        "mkldnn_cache_capacity": "OpenVINO keeps a cache of its own",
        "mkldnn_op_list": "OpenVINO chooses by itself",
        "mkldnn_bf16_op_list": "`precision` says it for the whole model",
        "use_calib": "it belongs to TensorRT",
        "min_subgraph_size": "it belongs to TensorRT",
        "reload_interval_s": "a model is read once, when the server starts",
    },
}
"""Keys that are taken but have no effect on OpenVINO, with the reasons, by the settings that have them."""
_RIGHTLY_SPELT: Final = "channel_recv_first_arrive"
_BLOCKS: Final[Mapping[type, tuple[str, ...]]] = {
    PipelineSettings: ("dag", "op", "logging"),
    DagSettings: ("tracer",),
    OpSettings: ("local_service_conf",),
}
"""The blocks that a block can hold."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExaminedConfig:
    """A configuration with all there is to say of it.

    Attributes:
        settings: what it says, with defaults in the place of what cannot be used.
        problems: what is wrong with it, in the order of its lines.
        without_effect: by the path of a key that has no effect here, why.
    """

    settings: PipelineSettings
    problems: tuple[Problem, ...]
    without_effect: Mapping[str, str]
    _root: Located
    _findings: Findings

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems because of which it cannot be used."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    def place(self, problem: Problem) -> Problem:
        """Give a problem that was found later the place of its path; one of another file, or without a path, stays."""
        if problem.file or not problem.path:
            return problem
        return self._findings.place(self._root, problem)


def read_pipeline_config(
    yml_file: str | Path | None = None,
    yml_dict: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> PipelineSettings:
    """Read ``config.yml``, or a dictionary in its place; blocking where it is a file.

    Unknown keys are warned about, keys that have no effect here are told at debug level.

    Args:
        yml_file: the file.
        yml_dict: what would be in it.
        overrides: options that are put over it, such as ``op.uci.concurrency=2``.

    Raises:
        ConfigError: something in it cannot be used, or not exactly one of file and dictionary is given.
    """
    examined = examine_pipeline_config(yml_file, yml_dict, overrides)
    if examined.errors:
        raise ConfigError(examined.errors)
    for problem in examined.problems:
        _log.warning("configuration", problem=str(problem))
    for key, reason in examined.without_effect.items():
        _log.debug("key without effect", key=key, reason=reason)
    return examined.settings


def examine_pipeline_config(
    yml_file: str | Path | None = None,
    yml_dict: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> ExaminedConfig:
    """Read as :func:`read_pipeline_config`, but hand over what is wrong, and what has no effect, with the settings.

    Raises:
        ConfigError: there is nothing to read.
    """
    if (yml_file is None) == (yml_dict is None):
        raise ConfigError([Problem("give either yml_file or yml_dict", suggestion="give one of the two")])
    source = Path(yml_file) if yml_file is not None else yml_dict or {}
    root, findings = read_document(source, overrides)
    reader = _PipelineReader(root, findings)
    settings = reader.read(source if isinstance(source, Path) else None)
    return ExaminedConfig(settings, findings.all, reader.without_effect, root, findings)


class _PipelineReader:
    """Reads one document from the top down; a block that has no value is an empty one."""

    def __init__(self, root: Located, findings: Findings) -> None:
        self._top = Section(root, findings)
        self.without_effect: dict[str, str] = {}

    def read(self, source: Path | None) -> PipelineSettings:
        top = self._top
        values = self._values(top, PipelineSettings)
        values.pop("grpc_gateway_port", None)
        entries = self._block(top, "op")
        ops = {str(name): self._op(str(name), self._block(entries, name)) for name in entries.node.members}
        dag = self._dag(self._block(top, "dag"))
        self._check_ports(values, dag.prometheus_port)
        logs = LoggingSettings(**self._values(self._block(top, "logging"), LoggingSettings))
        return PipelineSettings(**values, dag=dag, ops=ops, logging=logs, source=source)

    def _block(self, section: Section, key: str) -> Section:
        inner = section.section(key, "the value cannot be used")
        return inner or Section(replace(section.node.find(key), value={}), section.findings)

    def _values(self, section: Section, settings: type) -> dict[str, Any]:
        rules = TOP_RULES if settings is PipelineSettings else rules_of(settings)
        idle = _WITHOUT_EFFECT.get(settings, {})
        given = replace(section, node=replace(section.node, value=section.members))
        self.without_effect |= {member.path: idle[key] for key, member in given.members.items() if key in idle}
        return given.read({**rules, **dict.fromkeys(_BLOCKS.get(settings, ()))})

    def _dag(self, section: Section) -> DagSettings:
        spelt = {
            "channel_recv_frist_arrive" if key == _RIGHTLY_SPELT else key: each for key, each in section.members.items()
        }
        section = replace(section, node=replace(section.node, value=spelt))
        values = self._values(section, DagSettings)
        if values.get("enable_prometheus") and "prometheus_port" not in spelt:
            section.warn("enable_prometheus", "no prometheus_port is given: metrics are at /metrics of http_port alone")
        if "prometheus_port" in spelt and not values.get("enable_prometheus"):
            section.warn("prometheus_port", "prometheus_port has no effect without enable_prometheus")
        tracer = TracerSettings(**self._values(self._block(section, "tracer"), TracerSettings))
        return DagSettings(**values, tracer=tracer)

    def _op(self, name: str, section: Section) -> OpSettings:
        values = self._values(section, OpSettings)
        local = LocalServiceConf(**self._values(self._block(section, "local_service_conf"), LocalServiceConf))
        return OpSettings(name, **values, local_service_conf=local)

    def _check_ports(self, values: Mapping[str, Any], metrics: int | None) -> None:
        top = self._top
        if "rpc_port" not in top.members and "http_port" not in top.members:
            message = "rpc_port and http_port are both missing"
            top.findings.refuse(top.node, message, suggestion="give one of them, or both")
        rpc = values.get("rpc_port")
        taken = f"port {rpc} is that of rpc_port already"
        if rpc and rpc == values.get("http_port"):
            top.refuse("http_port", taken, suggestion="give another port")
        if rpc and rpc == metrics:
            node = top.node.find("dag", "prometheus_port")
            top.findings.refuse(node, taken, suggestion="give another port, or that of http_port")
