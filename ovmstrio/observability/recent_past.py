"""What a server remembers of its recent past for those who look at it: failed calls and lines of the log."""

from __future__ import annotations

from dataclasses import dataclass, field

from ovmstrio.observability.failed_calls import FailedCalls
from ovmstrio.observability.log_tail import LogTail

__all__ = ["RecentPast"]


@dataclass(frozen=True, slots=True)
class RecentPast:
    """Memories of one server, each of a bounded size."""

    failures: FailedCalls = field(default_factory=FailedCalls)
    log: LogTail = field(default_factory=LogTail)
