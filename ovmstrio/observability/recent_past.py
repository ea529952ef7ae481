"""What a server remembers of its recent past for those who look at it: failed calls and lines of the log."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ovmstrio.core.events import kept_body_bytes
from ovmstrio.observability.failed_calls import FailedCalls
from ovmstrio.observability.log_tail import LogTail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ovmstrio.core.events import RequestObserver

__all__ = ["RecentPast"]


@dataclass(frozen=True, slots=True)
class RecentPast:
    """Memories of one server, each of a bounded size.

    Attributes:
        body_bytes: how much is kept of the bodies of failed requests; 0 for nothing.
        failures: the calls that failed last.
        log: the last lines.
    """

    body_bytes: int = 0
    failures: FailedCalls = field(default_factory=FailedCalls)
    log: LogTail = field(default_factory=LogTail)

    @property
    def requests(self) -> tuple[RequestObserver, ...]:
        """Those who have to be told of requests, so that these have bodies."""
        return (self.failures,) if self.body_bytes else ()

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Take note of what happens while the block lasts, in the tasks that are started within it."""
        token = kept_body_bytes.set(self.body_bytes)
        try:
            with self.log.listening():
                yield
        finally:
            kept_body_bytes.reset(token)
