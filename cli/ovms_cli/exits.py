"""Exit codes of the commands; docs/exit_codes.md shows the table."""

from __future__ import annotations

from typing import Final

EX_OK: Final = 0
EX_FAILED: Final = 1
EX_UNREACHABLE: Final = 2
EX_USAGE: Final = 64
"""``EX_USAGE`` of sysexits.h, which OVMS also uses."""
EX_INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    EX_OK: "success; `serve`: every request was answered before the server stopped; `health`: ready",
    EX_FAILED: "failure: refused, not found, not ready, or problems in checked files; "
    "`serve`: the server could not start, or cut off requests when it stopped",
    EX_UNREACHABLE: "the server cannot be reached",
    EX_USAGE: "the command line is wrong",
    EX_INTERRUPTED: "interrupted (Ctrl-C); a stream was cancelled on the server",
}
"""Meanings of the exit codes, for every command."""
