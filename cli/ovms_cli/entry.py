"""Where the command begins: light, so that an interrupt finds somebody who takes it while the rest is imported."""

from __future__ import annotations

from ovms_cli.exits import EX_INTERRUPTED
from ovmstrio.server.end_watchdog import SHUTDOWN_WATCHDOG
from ovmstrio.server.gc_tuning import raise_gc_threshold
from ovmstrio.util.stdio import ignore_failed_writes, open_standard_streams


def main() -> None:
    """Run the command line; one that is interrupted ends with 130 and without a word."""
    open_standard_streams()
    ignore_failed_writes("stderr")
    raise_gc_threshold()
    try:
        from ovms_cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(EX_INTERRUPTED) from None
    finally:
        SHUTDOWN_WATCHDOG.start_for_exit()
