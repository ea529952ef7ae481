"""What both interfaces say of Triton's settings of traces and logs."""

from typing import Final

from ovmstrio.core.errors import NotSupported

__all__ = ["TRACE_SETTINGS", "check_trace_settings", "refuse_log_settings"]

TRACE_SETTINGS: Final = {"trace_level": ["OFF"], "trace_rate": ["0"], "trace_count": ["0"], "log_frequency": ["0"]}
"""No traces are written in Triton's form."""


def check_trace_settings(names: list[str], levels: list[str]) -> None:
    """Let pass what turns traces off.

    Raises:
        NotSupported: anything else.
    """
    if names != ["trace_level"] or levels not in (["OFF"], []):
        raise NotSupported("traces in Triton's form are not written; trace_level may be OFF and nothing else set")


def refuse_log_settings() -> None:
    """Refuse to tell or change what is logged.

    Raises:
        NotSupported: always.
    """
    raise NotSupported("what is logged is not changed while serving; --log_level and --log_format choose it")
