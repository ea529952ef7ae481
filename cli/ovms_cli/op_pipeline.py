"""Pipelines of Ops in ``ovms pipeline``: a ``config.yml``, and the script that makes the Ops."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from ovms_cli.console import EX_USAGE, fail
from ovms_cli.pictures import PictureFormat, render, write_picture
from ovms_cli.script import call_script

if TYPE_CHECKING:
    from ovmstrio.core.drawing import Drawing
    from ovmstrio.core.errors import Problem
    from ovmstrio.runtimes.ops.config.pipeline_file import ExaminedConfig
    from ovmstrio.runtimes.ops.web_service import WebService

__all__ = ["examine", "find_op_config", "find_script", "load_service", "show_service"]

_NAMES: Final = ("config.yml", "config.yaml")
_SUFFIXES: Final = (".yml", ".yaml")
_DEFAULT_SCRIPT: Final = "web_service.py"


def find_op_config(config: Path, service: Path | None) -> Path | None:
    """Give the configuration of a pipeline of Ops: a YAML file, or one of a directory without ``config.json``."""
    if not config.is_dir():
        return config if service is not None or config.suffix in _SUFFIXES else None
    found = [config / name for name in _NAMES if (config / name).is_file()]
    if not found or (service is None and (config / "config.json").is_file()):
        return None
    return found[0]


def find_script(config: Path, service: Path | None) -> Path | None:
    """Give the script that makes the Ops, ``web_service.py`` beside the configuration if it is not named."""
    script = service or config.with_name(_DEFAULT_SCRIPT)
    if script.is_file():
        return script
    if service is not None:
        fail(f"{service}: no such file; --service names the script that makes the Ops", EX_USAGE)
    return None


def load_service(config: Path, script: Path) -> WebService:
    """Run a script as far as to where it would serve, and give its service.

    What the script prints goes to standard error.

    Raises:
        ConfigError: no pipeline can be made of its Ops, or the script itself raised.
    """
    from ovmstrio.core.errors import ConfigError

    found: list[WebService] = []
    try:
        with contextlib.redirect_stdout(sys.stderr):
            call_script(script, [], str(config), found.append)
    except (ConfigError, typer.Exit):
        raise
    except Exception as error:
        raise ConfigError([_raised(error, script)]) from error
    return found[0]


def _raised(error: Exception, script: Path) -> Problem:
    import traceback

    from ovmstrio.core.errors import Problem

    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == script.resolve()]
    return Problem(f"the script raised {type(error).__name__}: {error}", str(script), lines[-1] if lines else None)


def examine(config: Path, service: WebService | None) -> ExaminedConfig:
    """Examine what a service would be configured with: the file, unless its script gives a dictionary.

    Raises:
        ConfigError: there is nothing to read.
    """
    from ovmstrio.runtimes.ops.config.pipeline_file import examine_pipeline_config

    if service is not None and service.yml_dict is not None:
        return examine_pipeline_config(yml_dict=service.yml_dict)
    return examine_pipeline_config(config)


def show_service(config: Path, service: Path | None, picture: PictureFormat, output: Path | None) -> None:
    """Draw the Ops of a script with their settings; exits with 1 if no pipeline can be made of them."""
    from ovmstrio.core.errors import ConfigError

    script = find_script(config, service)
    if script is None:
        fail(f"there is no {_DEFAULT_SCRIPT} beside {config}; --service names the script that makes the Ops", EX_USAGE)
    try:
        drawing = _draw(config, script)
    except ConfigError as error:
        fail(f"{error}\nsee: ovms pipeline check {config} --service {script}")
    write_picture(render(drawing, picture, plain=output is not None), output)


def _draw(config: Path, script: Path) -> Drawing:
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.runtimes.ops.graph import draw

    service = load_service(config, script)
    examined = examine(config, service)
    if examined.errors:
        raise ConfigError(examined.errors)
    return draw(service.graph(), examined.settings)
