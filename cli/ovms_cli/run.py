"""`ovms run`: a service's script, unchanged, as a server."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovms_cli.console import EX_USAGE, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.runtimes.ops import WebService

__all__ = ["call_script", "compat_folder", "execute_script", "register"]

HELP = """Run a pipeline service's script, such as a [bold]web_service.py[/] of Paddle Serving, unchanged.

[bold]paddle_serving_server[/] and [bold]paddle_serving_app[/] can be imported by it. [bold]-c FILE[/] takes the place
of the configuration that the script names; all other arguments after the script are the script's.
"""

_PACKAGE: Final = "paddle_serving_server"
_MAIN: Final = "__main__"


def register(app: typer.Typer) -> None:
    """Add the command."""
    settings = {"allow_interspersed_args": False, "ignore_unknown_options": True}
    app.command("run", help=HELP, context_settings=settings)(run)


def run(
    script: Annotated[Path, typer.Argument(help="The service's script.", exists=True, dir_okay=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="-c FILE, and what the script takes.")] = None,
    config: Annotated[str | None, typer.Option("-c", "--config", help="In place of the script's own.")] = None,
    bind_address: Annotated[str | None, typer.Option(help="Addresses to listen on, comma separated.")] = None,
) -> None:
    """Run a service's script."""
    from ovms_cli.serve_service import hosts_of
    from ovmstrio.observability.logs import configure_logs
    from ovmstrio.ops_server import ServiceOptions, run_service

    own, left = _take_config(arguments or [])
    file = config or own
    if file is not None and not Path(file).is_file():
        fail(f"{file}: no such file; -c names the pipeline's config.yml", EX_USAGE)
    configure_logs()
    options = ServiceOptions(config=file, grpc_hosts=None if bind_address is None else hosts_of(bind_address))
    execute_script(script, left, file, lambda service: run_service(service, options))


def execute_script(
    script: Path, arguments: Sequence[str], config: str | None, serve: Callable[[WebService], None]
) -> None:  # fmt: skip
    """Call a script as :func:`call_script` does; exits with 1 if it raises, and says why."""
    from ovmstrio.core.errors import ConfigError

    try:
        call_script(script, arguments, config, serve)
    except typer.Exit:
        raise
    except ConfigError as error:
        fail(str(error))
    except Exception as error:  # noqa: BLE001 - the border of the user's script
        sys.stderr.write("".join(traceback.format_exception(_in_script(error, script.absolute()))))
        raise typer.Exit(1) from None


def call_script(
    script: Path, arguments: Sequence[str], config: str | None, serve: Callable[[WebService], None]
) -> None:  # fmt: skip
    """Run a script as Python would, with our packages on its path and ``run_service`` doing what it is told.

    Exits with 1 if the script cannot be prepared, or does not call ``run_service``.

    Raises:
        BaseException: whatever the script raises.
    """
    from ovmstrio.runtimes.ops.scripts import run_as_main
    from ovmstrio.runtimes.ops.web_service import set_service_runner

    sys.argv = [str(script), *arguments]
    script = script.absolute()  # for a script may go elsewhere before it serves, and workers read it again
    sys.path[0:0] = [str(script.resolve().parent), str(compat_folder())]
    _prepare_compat(config)
    served: list[str] = []

    def note_and_serve(service: WebService) -> None:
        served.append(service.name)
        serve(service)

    set_service_runner(note_and_serve)
    main: Any = sys.modules[_MAIN]
    try:
        run_as_main(script)
    finally:
        set_service_runner(None)
        sys.modules[_MAIN] = main
    if not served:
        fail(f"{script} ran no service; a script prepares a WebService and calls its run_service")


def _in_script(error: Exception, script: Path) -> Exception:
    """Leave out of an error's traceback what comes before the script, which is all if the script is not Python."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != str(script):
        found = found.tb_next
    return error.with_traceback(found)


def compat_folder() -> Path:
    """Find the folder of the packages that scripts import: in the wheel beside this, in a checkout at its top."""
    here = Path(__file__).resolve().parent
    return next(folder for folder in (here / "compat", here.parents[1] / "compat") if (folder / _PACKAGE).is_dir())


def _prepare_compat(config: str | None) -> None:
    """Import our package before the script does, so that a clash with the original is told first."""
    try:
        from paddle_serving_server.util import CONFIG_VARIABLE
    except ImportError as error:
        fail(str(error))
    if config is not None:
        os.environ[CONFIG_VARIABLE] = config


def _take_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``-c FILE`` or ``--config FILE`` out of a script's arguments."""
    left = list(arguments)
    for index, argument in enumerate(left):
        name, equals, value = argument.partition("=")
        if name not in {"-c", "--config"}:
            continue
        if equals:
            return value, left[:index] + left[index + 1 :]
        if index + 1 == len(left):
            fail(f"{argument} needs a file", EX_USAGE)
        return left[index + 1], left[:index] + left[index + 2 :]
    return None, left
