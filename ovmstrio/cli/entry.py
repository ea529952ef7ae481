"""Entry point of the command: light to import, so that SIGINT is handled before other modules are imported."""

from __future__ import annotations

from ovmstrio.util.interrupts import exit_at_interrupt, ignore_interrupts, raise_at_interrupt

exit_at_interrupt()

import atexit  # noqa: E402 - SIGINT is handled before
import os  # noqa: E402 - as above
import sys  # noqa: E402 - as above
from contextlib import suppress  # noqa: E402 - as above
from pathlib import Path  # noqa: E402 - as above
from typing import TYPE_CHECKING, Final  # noqa: E402 - as above

from ovmstrio.cli.exits import EX_FAILED, EX_INTERRUPTED  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Callable

    from ovmstrio.util.stdio import ExitingFile

_ELF: Final = b"\x7fELF"
_BLAS_SPIN: Final = "20"
"""Binary logarithm of the processor cycles for which an idle thread of NumPy's OpenBLAS waits before it sleeps.

Its default, 26, takes 20 ms of each core when NumPy is imported and after each call."""


def main() -> None:
    """Run the command line; an interrupt exits with 130 and without a message."""
    # Runs last: while the interpreter ends, the signal would end the process without an exit code.
    atexit.register(ignore_interrupts)
    from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
    from ovmstrio.server.gc_tuning import raise_gc_threshold
    from ovmstrio.server.restart import remember_start
    from ovmstrio.util.optional_imports import skip_optional_imports
    from ovmstrio.util.stdio import exit_on_failed_writes, ignore_failed_writes, open_standard_streams

    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _BLAS_SPIN)
    skip_optional_imports(["structlog"])
    remember_start()
    open_standard_streams()
    ignore_failed_writes("stderr")
    output = exit_on_failed_writes()
    raise_gc_threshold()
    from ovmstrio.cli.main import main as run

    try:
        raise_at_interrupt()
        _run(run, output)
    except (KeyboardInterrupt, SystemExit) as ended:
        exit_at_interrupt()
        if isinstance(ended, SystemExit) and ended.code != EX_INTERRUPTED:
            raise
        # The end of the interpreter waits for threads, and may replace the exit code by the signal.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(EX_INTERRUPTED)
    finally:
        exit_at_interrupt()
        SHUTDOWN_WATCHDOG.start_for_exit()


def _run(run: Callable[[], None], output: ExitingFile) -> None:
    """Run the command line; exit with 1 if standard output could not be written, also within a nursery."""
    try:
        run()
    finally:
        with suppress(OSError, ValueError):  # user code has closed or replaced the stream
            sys.stdout.flush()
        if output.has_failed:
            raise SystemExit(EX_FAILED)


def run_alias() -> None:
    """Run the command line under the name ``ovms``, or OVMS's own program of that name if it is on the path."""
    for folder in os.get_exec_path():
        program = Path(folder, "ovms")
        if os.access(program, os.X_OK) and _is_binary(program):
            os.execv(program, [str(program), *sys.argv[1:]])  # noqa: S606 - the program that the user named
    main()


def _is_binary(program: Path) -> bool:
    try:
        with program.open("rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False
