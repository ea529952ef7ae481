"""Exit codes of all commands; docs/exit_codes.md shows the same table."""

from __future__ import annotations

from typing import Final

EX_OK: Final = 0
EX_FAILED: Final = 1
EX_UNREACHABLE: Final = 2
EX_USAGE: Final = 64
"""EX_USAGE of sysexits.h, as in OVMS."""
EX_INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    EX_OK: "success; of a server: stopped after every request was answered; of `health`: ready",
    EX_FAILED: "failure: request refused, not found, not ready, or errors in a checked file; "
    "of a server: could not start, or aborted requests on shutdown",
    EX_UNREACHABLE: "the server does not answer at the address",
    EX_USAGE: "the command line is wrong",
    EX_INTERRUPTED: "interrupted (Ctrl-C); a stream was cancelled on the server",
}
"""Meaning of each exit code, for every command."""
