"""The text of ``config.yml`` as located values: a file, or a dictionary, with options put over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.config.documents import load_yaml
from ovmstrio.config.findings import Findings, shown
from ovmstrio.config.located import InvalidSyntax, Located, locate
from ovmstrio.config.sections import Unusable, rules_of
from ovmstrio.config.yaml_text import parse_yaml
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.config.op_settings import OpSettings

if TYPE_CHECKING:
    from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings

__all__ = ["CONFIG_VARIABLE", "conf_dict", "read_document", "settings_of"]

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
