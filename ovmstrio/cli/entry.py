"""Entry point of the command: light to import, so that an interrupt during the other imports is handled."""

from __future__ import annotations

from ovmstrio.cli.exits import EX_INTERRUPTED
from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
from ovmstrio.server.gc_tuning import raise_gc_threshold
from ovmstrio.server.restart import remember_start
from ovmstrio.util.stdio import ignore_failed_writes, open_standard_streams


def main() -> None:
    """Run the command line; an interrupt exits with 130 and without a message."""
    remember_start()
    open_standard_streams()
    ignore_failed_writes("stderr")
    raise_gc_threshold()
    try:
        from ovmstrio.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(EX_INTERRUPTED) from None
    finally:
        SHUTDOWN_WATCHDOG.start_for_exit()
