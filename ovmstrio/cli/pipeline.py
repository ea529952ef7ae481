"""``ovms pipeline``: check and show the pipelines of a configuration file, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import EX_USAGE, fail, resolve_file, stderr
from ovmstrio.cli.diagram_output import (
    DrawingJsonOption,
    FileOption,
    PictureFormat,
    PictureOption,
    render,
    write_picture,
)
from ovmstrio.cli.problems import Strict, as_errors, conclude, count, point_to, problem_facts, show_problems
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen
from ovmstrio.util.regular_files import read_regular_bytes

if TYPE_CHECKING:
    from ovmstrio.config.specs import PipelineSpec
    from ovmstrio.core.errors import Problem

_DEFAULT_NAME = "config.json"

_ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="File config.json, config.yml of a pipeline of Ops, or the directory of either."
    ),
]
_PipelineName = Annotated[str, typer.Argument(metavar="NAME", help="Name of one pipeline. Default: all.")]
_Service = Annotated[
    Path | None,
    typer.Option(
        "--service",
        metavar="SCRIPT",
        help="Script that creates the Ops of config.yml. Default: web_service.py next to it.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = App(help="Check and show the pipelines of a configuration file.")
    group.command()(check)
    group.command()(show)
    app.add_typer(group, name="pipeline")


def check(
    config: _ConfigPath,
    name: _PipelineName = "",
    *,
    no_models: Annotated[
        bool, typer.Option("--no-models", help="Check only the structure, without loading models and custom nodes.")
    ] = False,
    strict: Strict = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
    service: _Service = None,
) -> None:
    """Report all problems of pipelines, with line and hint. Exit code 1 on errors."""
    from ovmstrio.server.check import check_pipelines
    from ovmstrio.telemetry.logs import configure_logs
    from ovmstrio.util.interrupts import run_interruptible

    configure_logs(level="ERROR")
    form = chosen(form, as_json=as_json)
    if (of_ops := _find_ops(config, service, name)) is not None:
        from ovmstrio.cli.op_pipeline import check_service

        check_service(of_ops, service, load=not no_models, strict=strict, output=form)
    file = resolve_file(config, _DEFAULT_NAME)
    pipelines, problems = _read(file, name)
    with stderr().status(f"checking {file} ..."):
        report = run_interruptible(lambda: check_pipelines(file, [name] if name else [], load=not no_models))
    if not pipelines and not problems:
        fail(f"{file}: no pipelines found in pipeline_config_list")
    found = as_errors(report.problems) if strict else report.problems
    facts = {"pipelines": [pipeline.name for pipeline in pipelines], **problem_facts(found)}
    success_message = f"{count(len(pipelines), 'pipeline')}, no problem found"
    conclude(found, success_message, facts, output=form)


def show(
    config: _ConfigPath,
    name: _PipelineName = "",
    *,
    picture: PictureOption = PictureFormat.TEXT,
    as_json: DrawingJsonOption = False,
    output: FileOption = None,
    service: _Service = None,
) -> None:
    """Draw pipelines: nodes in layers with their models, demultiplexers, gathers and connections."""
    picture = PictureFormat.JSON if as_json else picture
    if (of_ops := _find_ops(config, service, name)) is not None:
        from ovmstrio.cli.op_pipeline import show_service

        show_service(of_ops, service, picture, output)
        return
    from ovmstrio.pipelines.plan import draw_pipeline

    file = resolve_file(config, _DEFAULT_NAME)
    pipelines, problems = _read(file, name)
    if not pipelines:
        show_problems(problems)
        fail(f"{file}: there is no pipeline to show")
    if len(pipelines) > 1 and picture is not PictureFormat.TEXT:
        fail(f"name one of the pipelines: {', '.join(each.name for each in pipelines)}", EX_USAGE)
    parts = []
    for spec in pipelines:
        title = f"{spec.name}\n" if len(pipelines) > 1 else ""
        parts.append(title + render(draw_pipeline(spec), picture, plain=output is not None))
    write_picture("\n".join(parts), output)
    point_to(f"ovms pipeline check {config}{f' {name}' if name else ''}", problems)


def _find_ops(config: Path, service: Path | None, name: str) -> Path | None:
    """Return the configuration file of a pipeline of Ops, None for other pipelines."""
    from ovmstrio.cli.op_pipeline import find_op_config

    file = find_op_config(config, service)
    if file is None:
        return None
    found = resolve_file(file, "config.yml")
    if name:
        fail(f"{found} has one pipeline, named by its script: remove {name!r}", EX_USAGE)
    return found


def _read(file: Path, name: str) -> tuple[list[PipelineSpec], list[Problem]]:
    """Return the selected pipelines, and the problems that static checks find in them and in the file."""
    from ovmstrio.config.config_file import parse_config_leniently
    from ovmstrio.config.documents import did_you_mean
    from ovmstrio.config.specs import PipelineSpec
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.server.check import examine_pipelines
    from ovmstrio.server.kinds import KINDS

    try:
        examined = parse_config_leniently(KINDS.values(), read_regular_bytes(file), file)
    except ConfigError as error:
        return [], list(error.problems)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    problems = [*examined.fatal, *examined.spec.problems]
    known = [spec.name for spec in examined.spec.of(PipelineSpec)]
    if name and name not in known and not problems:
        hint = did_you_mean(name, known, otherwise=f"known are {', '.join(known) or 'none'}")
        fail(f"{file}: there is no pipeline {name!r}; {hint}", EX_USAGE)
    found = [spec for spec in examined.spec.of(PipelineSpec) if name in ("", spec.name)]
    return found, problems + examine_pipelines(examined.spec, [name] if name else ())
