"""Command-line options of ``ovms serve``, one per field of ``ServerSettings``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

import typer

from ovmstrio.cli.commands import LateCommand
from ovmstrio.cli.help_text import ARGUMENTS, lay_out, parameter_entries, parameter_entry, usage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pydantic.fields import FieldInfo

SHOW_ALL: Final = "--help-all"

COMMON: Final = {
    "Model": (
        "service", "config", "config_path", "model_name", "model_path", "task", "target_device", "batch_size",
        "plugin_config",
    ),
    "Server": (
        "bind_address", "port", "rest_port", "grpc_bind_address", "rest_bind_address", "workers", "cache_dir",
        "max_concurrency", "drain_seconds",
    ),
    "Security and logs": ("tls_cert", "tls_key", "keys_file", "log_level", "log_format"),
}  # fmt: skip
"""Options that most users of a server need; ``--help-all`` and ``ovms help TOPIC`` show the others."""

_METAVARS: Final = {
    "access_log": "", "allowed_headers": "NAMES", "allowed_local_media_path": "DIR",
    "allowed_media_domains": "HOSTS", "allowed_methods": "METHODS", "allowed_origins": "ORIGINS",
    "batch_size": "SIZE", "batching": "JSON", "cache_size": "GB", "chat_template_mode": "JINJA|MINJA",
    "color_format": "FORMAT", "default_prompt_name": "NAME", "draft_device": "DEVICE", "draft_models_path": "PATH",
    "grpc_bind_address": "HOSTS",
    "jwt_audience": "AUDIENCE", "kv_cache_precision": "u8|f16|bf16", "kv_overcommit": "FACTOR", "layout": "LAYOUT",
    "load_model": "NAMES", "log_levels": "LOGGER=LEVEL,...", "log_path": "FILE", "lora_adapters": "NAME=PATH,...",
    "mean": "VALUES",
    "metrics_families": "NAMES", "metrics_list": "NAMES", "model_name": "NAME", "model_version_policy": "JSON",
    "oidc_issuer": "URL", "plugin_config": "JSON", "pooling": "CLS|LAST|MEAN", "precision": "TYPE",
    "reasoning_parser": "NAME", "reload": "swap|retire_first|auto", "rest_bind_address": "HOSTS",
    "scale": "VALUES", "server_name": "NAME", "shape": "SHAPE", "shape_buckets": "JSON", "speed_max": "FACTOR",
    "speed_min": "FACTOR", "target_device": "DEVICE", "task": "TASK", "tool_parser": "NAME",
    "trusted_proxies": "ADDRESSES", "workers": "N|auto",
}  # fmt: skip
"""Metavars that neither type nor name of a setting suggest."""
_BY_NAME: Final = {
    "port": "PORT", "seconds": "SECONDS", "minutes": "MINUTES", "timeout": "SECONDS", "time": "SECONDS",
    "delay": "SECONDS", "interval": "SECONDS", "bytes": "BYTES", "size": "BYTES", "quota": "BYTES", "limit": "BYTES",
    "gb": "GB", "dir": "DIR", "store": "DIR", "file": "FILE", "cert": "FILE", "key": "FILE", "ca": "FILE",
}  # fmt: skip
"""Metavars by the last word of a setting's name."""
_COUNTS: Final = frozenset({"best_of_limit", "max_tokens_limit"})


class ServerCommand(LateCommand):
    """Command with the options of a server, whose help shows the common ones."""

    def get_help(self, ctx: Any) -> str:
        """Return the help text with arguments and common options."""
        from ovmstrio.server.settings import GROUPS

        params = {each.name: each for each in self.get_params(ctx)}
        entries = [each for each in parameter_entries(params.values()) if each.group == ARGUMENTS]
        entries += [
            parameter_entry(params[name], group, brief=True)
            for group, names in COMMON.items()
            for name in names
            if name in params
        ]
        closing = f"More options: {SHOW_ALL}, or ovms help with one of {', '.join(GROUPS)}."
        return lay_out(usage(ctx.command_path, params.values()), self.help or "", entries, closing)

    def full_help(self, ctx: Any) -> str:
        """Return the help text with all options; those without effect are only named."""
        params = self.get_params(ctx)
        idle = [each for each in params if each.hidden]
        closing = f"{idle[0].rich_help_panel}: {', '.join(each.opts[0] for each in idle)}."
        return lay_out(usage(ctx.command_path, params), self.help or "", parameter_entries(params), closing)


def show_all(ctx: typer.Context, is_requested: bool | None) -> None:
    """Print the help with all options, and exit: the callback of ``--help-all``."""
    if is_requested and not ctx.resilient_parsing and isinstance(ctx.command, ServerCommand):
        typer.echo(ctx.command.full_help(ctx))
        raise typer.Exit


def server_parameters(*, without: Collection[str] = (), only: Collection[str] | None = None) -> list[inspect.Parameter]:
    """Create an option for each setting of a server, or some, and ``--help-all``, for the signature of a command."""
    from ovmstrio.server.settings import ServerSettings

    settings = ServerSettings.model_fields.items()
    chosen = (each for each in settings if each[0] not in without and (only is None or each[0] in only))
    return [*(_parameter(name, field) for name, field in chosen), _help_all()]


def is_flag(field: FieldInfo) -> bool:
    """Return whether the option of a setting is a flag."""
    return bool in _types(field.annotation)


def _help_all() -> inspect.Parameter:
    option = typer.Option(
        SHOW_ALL, is_eager=True, expose_value=False, callback=show_all, help="Show all options and exit."
    )  # fmt: skip
    kind = Annotated[bool | None, option]
    return inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Create an option for a setting: a flag stays a flag, other values are text that the settings validate."""
    from ovmstrio.server.settings import IGNORED, IGNORED_GROUP

    types = set(_types(field.annotation))
    is_idle = name in IGNORED or name == "pipeline_type"
    has_flag = is_flag(field)
    shown = name.replace("_", "-")
    extra = field.json_schema_extra
    option = typer.Option(
        f"--{shown}/--no-{shown}" if has_flag else f"--{shown}",
        help=field.description,
        rich_help_panel=IGNORED_GROUP if is_idle else str(extra["group"]) if isinstance(extra, dict) else None,
        hidden=is_idle,
        show_default=_default(field.default),
        metavar=None if has_flag else _metavar(name, types),
    )
    kind: Any = bool if has_flag else str
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _default(value: Any) -> str | bool:
    if value is None or value is False or value == "":
        return False
    return "on" if value is True else str(value)


def _metavar(name: str, types: set[Any]) -> str:
    choices = [str(value) for each in types if get_origin(each) is Literal for value in get_args(each)]
    if choices:
        return "|".join(choices)
    last = name.rpartition("_")[2]
    if name in _METAVARS:
        return _METAVARS[name]
    if name in _COUNTS:
        return "N"
    if last in _BY_NAME:
        return _BY_NAME[last]
    return "PATH" if Path in types else "N" if int in types else "NUMBER" if float in types else "TEXT"


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation."""
    if get_origin(annotation) is Literal or not get_args(annotation):
        yield annotation
    else:
        for each in get_args(annotation):
            yield from _types(each)
