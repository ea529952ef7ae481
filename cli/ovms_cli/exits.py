"""How commands end: one table of exit codes, which docs/exit_codes.md shows."""

from __future__ import annotations

from typing import Final

EX_OK: Final = 0
EX_FAILED: Final = 1
EX_UNREACHABLE: Final = 2
EX_USAGE: Final = 64
"""That of sysexits.h, which OVMS uses too."""
EX_INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    EX_OK: "done; of a server that was told to end: every request got its answer; of `health`: ready",
    EX_FAILED: "the server or a file says no: refused, not found, not ready, problems in what was checked; "
    "of a server: it could not start, or cut requests at its end",
    EX_UNREACHABLE: "nobody answers at the address",
    EX_USAGE: "the command line is wrong",
    EX_INTERRUPTED: "interrupted (Ctrl-C); of a stream, it was cancelled on the server",
}
"""What each exit code means, for every command."""
