"""Execution of a service's script as Python would run it, with our packages on its path."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ovmstrio.cli.console import echo, fail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ovmstrio.ops.graph import WebService

_MAIN: Final = "__main__"


def execute_script(
    script: Path, arguments: Sequence[str], config: str | None, serve: Callable[[WebService], None]
) -> None:  # fmt: skip
    """Call a script as :func:`call_script` does; print the error and exit with 1 if it raises."""
    from ovmstrio.core.errors import ConfigError

    try:
        call_script(script, arguments, config, serve)
    except typer.Exit:
        raise
    except ConfigError as error:
        fail(str(error))
    except Exception as error:  # noqa: BLE001 - the border of the user's script
        echo("".join(traceback.format_exception(_in_script(error, script.absolute()))), nl=False, file=sys.stderr)
        raise typer.Exit(1) from None


def call_script(
    script: Path, arguments: Sequence[str], config: str | None, serve: Callable[[WebService], None]
) -> None:  # fmt: skip
    """Run a script as Python would, with our packages on its path and ``serve`` as its ``run_service``.

    While the script runs, numpy has the names of numpy 1. Exits with 1 if the script cannot be prepared, or does not
    call ``run_service``.

    Raises:
        BaseException: any error of the script.
    """
    from ovmstrio.isolation.compat_path import COMPAT_FOLDER
    from ovmstrio.ops.graph import set_service_runner
    from ovmstrio.ops.numpy1_compat import numpy1_compat
    from ovmstrio.ops.prepared_service import run_as_main

    sys.argv = [str(script), *arguments]
    script = script.absolute()  # The script may change the working directory, and workers read it again.
    sys.path[0:0] = [str(script.resolve().parent), str(COMPAT_FOLDER)]
    _prepare_compat(config)
    served: list[str] = []

    def note_and_serve(service: WebService) -> None:
        served.append(service.name)
        serve(service)

    set_service_runner(note_and_serve)
    main: Any = sys.modules[_MAIN]
    try:
        with numpy1_compat():
            run_as_main(script)
    finally:
        set_service_runner(None)
        sys.modules[_MAIN] = main
    if not served:
        fail(f"{script} ran no service: the script must prepare a WebService and call its run_service")


def _in_script(error: Exception, script: Path) -> Exception:
    """Drop the frames above the script from an error's traceback: all frames if the script is not valid Python."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != str(script):
        found = found.tb_next
    return error.with_traceback(found)


def _prepare_compat(config: str | None) -> None:
    """Import our package before the script does, to report a clash with the original package first."""
    try:
        from paddle_serving_server.util import CONFIG_VARIABLE
    except ImportError as error:
        fail(str(error))
    if config is not None:
        os.environ[CONFIG_VARIABLE] = config
