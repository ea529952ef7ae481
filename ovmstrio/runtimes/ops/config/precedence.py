"""Which of several sources of an Op's setting counts: its constructor, then ``config.yml``, then the default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from ovmstrio.config.findings import shown
from ovmstrio.config.located import locate
from ovmstrio.config.value_rules import Unusable, rules_of
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.config.op_settings import OpSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.ops.config.op_settings import PipelineSettings

__all__ = ["ConstructorArguments", "settings_of"]

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
