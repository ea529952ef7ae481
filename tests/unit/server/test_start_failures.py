"""What the log tells of a server that could not start."""

from __future__ import annotations

import errno
import os

from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.server.start_failures import log_failures


def _logged(*errors: Exception) -> list[str | None]:
    with capture_logs() as logs:
        log_failures(ExceptionGroup("", [ExceptionGroup("", list(errors))]))
    assert {line["event"] for line in logs} == {"failed to start api"}
    return [line.get("reason") for line in logs]


def test_each_error_has_a_line() -> None:
    """With the server's own words, or the system's and what was being done; others bring their traceback."""
    busy = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    busy.add_note("cannot listen at here:1")
    busy.add_note("choose another port")
    assert _logged(ConfigError([Problem("no", file="a.yaml", line=3)]), busy) == [
        "a.yaml:3: no",
        "Address already in use; cannot listen at here:1; choose another port",
    ]
    assert _logged(FileNotFoundError(errno.ENOENT, "No such file", "/x")) == ["No such file: /x"]
    assert _logged(ValueError("a bug")) == [None]
