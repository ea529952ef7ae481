"""Only the newest packets: the default policy over queues that are cut short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ovmstrio.runtimes.graphs.policies.sync_set import DefaultPolicy
from ovmstrio.runtimes.graphs.timestamps import MIN, next_allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ovmstrio.runtimes.graphs.config.graph_config import PolicyConfig
    from ovmstrio.runtimes.graphs.input_streams import InputStream
    from ovmstrio.runtimes.graphs.policies.steps import Step

__all__ = ["FixedSizePolicy"]


class FixedSizePolicy(DefaultPolicy):
    """Drops old packets when a queue has grown to ``trigger`` down to ``target``, on every input at one timestamp.

    What comes late is dropped as if it had come in time.  With ``fixed_min`` nothing is dropped until every queue has
    grown to ``trigger``, and each keeps at least ``target``.
    """

    def __init__(
        self, streams: Sequence[InputStream], *, trigger: int = 2, target: int = 1, fixed_min: bool = False
    ) -> None:
        super().__init__(streams)
        self._trigger = trigger
        self._target = target
        self._fixed_min = fixed_min
        self._keep_from = MIN

    @classmethod
    def configured(cls, streams: Sequence[InputStream], config: PolicyConfig) -> Self:
        """Make the policy that the options describe."""
        options = config.options
        if options is None:
            return cls(streams)
        return cls(
            streams,
            trigger=options.trigger_queue_size,
            target=options.target_queue_size,
            fixed_min=options.fixed_min_size,
        )

    def next(self) -> Step:
        """Drop what is too old, then take as the default does."""
        self.arrived()
        return super().next()

    def arrived(self) -> None:
        """Drop what is too old."""
        keep_from = self._keep_all() if self._fixed_min else self._keep_any()
        for stream in self._streams:
            while stream.queue and stream.queue[0].timestamp < keep_from:
                stream.queue.popleft()

    def _keep_any(self) -> int:
        for stream in self._streams:
            if len(stream.queue) >= self._trigger and len(stream.queue) > self._target:
                newest_dropped = stream.queue[-self._target - 1].timestamp
                self._keep_from = max(self._keep_from, next_allowed(newest_dropped))
        return self._keep_from

    def _keep_all(self) -> int:
        if any(len(stream.queue) < self._trigger for stream in self._streams):
            return MIN
        return min(stream.queue[-self._target].timestamp for stream in self._streams)
