"""``ovms check``: load everything that a configuration names without serving, and report all problems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ovmstrio.cli.console import fail, stderr, stdout
from ovmstrio.cli.problems import Strict, as_errors, count, count_problems, problem_rows, safe, show_problems
from ovmstrio.cli.tables import FormatOption, JsonOption, Output, chosen, print_csv

if TYPE_CHECKING:
    from ovmstrio.server.check import CheckReport


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(check)


def check(
    location: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="What ovms serve takes: a model file, a folder, a configuration, a graph or a project.",
        ),
    ],
    *,
    no_import: Annotated[bool, typer.Option("--no-import", help="Do not import handlers and scripts.")] = False,
    keys_file: Annotated[
        Path | None, typer.Option("--keys-file", metavar="FILE", help="Also check this key file.")
    ] = None,
    strict: Strict = False,
    form: FormatOption = Output.TABLE,
    as_json: JsonOption = False,
) -> None:
    """Validate a configuration: load everything, report all problems with file and line. Exit code 1 on errors.

    A configured service that can never be ready, such as a model without a version, is a warning. With --strict,
    warnings are errors.
    """
    import sys
    from contextlib import redirect_stdout
    from dataclasses import replace
    from functools import partial

    from ovmstrio.server.check import check_config
    from ovmstrio.telemetry.logs import configure_logs
    from ovmstrio.util.interrupts import run_interruptible

    form = chosen(form, as_json=as_json)
    pipeline = _find_pipeline(location, as_text=form is Output.TABLE)
    configure_logs(level="ERROR")
    _leave_out_what_is_reported()
    # Output of user code must not mix with the report on standard output.
    with stderr().status(f"checking {location} ..."), redirect_stdout(sys.stderr):
        if pipeline is not None:
            report = _check_pipeline(pipeline, imports=not no_import, keys_file=keys_file)
        else:
            report = run_interruptible(partial(check_config, location, imports=not no_import, keys_file=keys_file))
    if strict:
        report = replace(report, problems=tuple(as_errors(report.problems)))
    if form is Output.JSON:
        _print_json(report)
    elif form is Output.CSV:
        _print_csv(report)
    else:
        _show(report)
    raise typer.Exit(1 if report.errors else 0)


def _find_pipeline(location: str, *, as_text: bool) -> Path | None:
    """Return the configuration of a pipeline of Ops; None for anything else.

    Exits with 1 ``as_text`` if there is no such path.
    """
    from ovmstrio.core.errors import ConfigError
    from ovmstrio.server.target import TargetKind, find_target

    try:
        target = find_target(location)
    except ConfigError as error:
        if as_text and not Path(location).exists():
            fail(str(error))
        return None
    return target.path if target.kind is TargetKind.OPS else None


def _check_pipeline(config: Path, *, imports: bool, keys_file: Path | None) -> CheckReport:
    """Check a pipeline of Ops with the script next to its configuration."""
    from ovmstrio.cli.op_pipeline import find_service_problems
    from ovmstrio.server.check import CheckReport, LoadedVersion, check_keys

    names, problems = find_service_problems(config, imports=imports)
    problems += [] if keys_file is None else check_keys(keys_file)
    is_sound = all(problem.severity != "error" for problem in problems)
    loaded = [LoadedVersion(name, 1) for name in names if is_sound]
    return CheckReport(tuple(loaded), tuple(problems))


def _leave_out_what_is_reported() -> None:
    """Drop log records of failed loads, which the report repeats, unless they have a traceback."""
    import logging

    from ovmstrio.telemetry.log_levels import LOADING_LOGGERS

    def adds_something(record: logging.LogRecord) -> bool:
        has_traceback = isinstance(record.msg, dict) and bool(record.msg.get("exc_info"))
        return has_traceback or not record.name.startswith(LOADING_LOGGERS)

    for handler in logging.getLogger().handlers:
        handler.addFilter(adds_something)


def _print_json(report: CheckReport) -> None:
    import json
    from dataclasses import asdict

    facts: dict[str, Any] = {
        "ok": not report.errors,
        "errors": len(report.errors),
        "warnings": len(report.warnings),
        **asdict(report),
    }
    typer.echo(json.dumps(facts, indent=2))


def _print_csv(report: CheckReport) -> None:
    """Print a row for each problem and each loaded version."""
    header, *rows = problem_rows(report.problems)
    loads: list[list[Any]] = []
    for each in report.loaded:
        loads.append(["loads", "", "", "", f"{each.model} version {each.version}", "", "", ""])
        loads += [["detected", one.source, "", one.setting, f"{one.value}", "", "", ""] for one in each.detected]
    print_csv([header, *rows, *loads])


def _show(report: CheckReport) -> None:
    show_problems(report.problems)
    for loaded in report.loaded:
        stdout().print(f"[green]loads[/]  {safe(loaded.model)} version {loaded.version}", highlight=False)
        for each in loaded.detected:
            facts = f"       [dim]{each.setting:20}[/] {safe(f'{each.value!s:20}')} [dim]{safe(each.source)}[/]"
            stdout().print(facts, highlight=False, soft_wrap=True)
    stdout().print(_summary(report), highlight=False)


def _summary(report: CheckReport) -> str:
    versions = count(len(report.loaded), "version")
    if not report.problems:
        return f"[bold green]ok[/]: {versions} loaded, no problem found"
    found = count_problems(report.problems)
    mark = "[bold red]not ok[/]" if report.errors else "[bold green]ok[/]"
    return f"{mark}: {found}; {versions} loaded"
