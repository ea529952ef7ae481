"""What models that make text count of themselves, for Prometheus; everything happens on the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric

    from ovmstrio.core.generation import Finish

__all__ = ["CANCELLED", "ERROR", "TextMetrics"]

CANCELLED: Final = "cancelled"
ERROR: Final = "error"
"""Why requests ended, beside the values of ``Finish``."""

_PREFIX: Final = "ovmstrio_llm_"
_MODEL: Final = "model_name"
_REASON: Final = "finish_reason"
_STEPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAITS: Final = (0.001, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BATCHES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class TextMetrics:
    """The families of one model; a collector.

    Args:
        model: its name.
    """

    def __init__(self, model: str) -> None:
        self._families: list[Counter | Gauge | Histogram] = []
        self._model = model
        self.running = self._gauge("requests_running", "Texts that are being made.")
        self.waiting = self._gauge("requests_waiting", "Requests that wait for room in the batch.")
        self.cache_usage = self._gauge("kv_cache_usage", "Part of the cache of keys and values that is filled, 0 to 1.")
        self.cache_bytes = self._gauge("kv_cache_bytes", "Size of the cache of keys and values.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were accepted.")
        self.cached_tokens = self._counter(
            "cached_prompt_tokens", "Tokens of prompts that were found in the cache of prefixes."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were made.")
        self.cancelled_tokens = self._counter("cancelled_tokens", "Tokens of answers that nobody took to their end.")
        self.restarts = self._counter("engine_restarts", "Engines that were started, or batches made, once more.")
        self.preemptions = self._counter("preemptions", "Texts that were suspended for lack of room in the cache.")
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request to its first token.", _WAITS)
        self.next_token = self._histogram(
            "inter_token_latency_seconds", "From one token of a text to the next.", _STEPS
        )
        self.request = self._histogram("e2e_request_latency_seconds", "From a request to its end.", _WAITS)
        self.queue = self._histogram("queue_time_seconds", "From a request to its place in the batch.", _WAITS)
        self.step = self._histogram("step_seconds", "Length of a step of the batch.", _STEPS)
        self.batch = self._histogram("batch_size", "Texts in a step of the batch.", _BATCHES)
        self._finished = Counter(
            f"{_PREFIX}requests_finished", "Requests that have ended, by why.", [_MODEL, _REASON], registry=None
        )
        self._families.append(self._finished)
        self._rebuilds = 0.0
        self._suspensions = 0.0

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(f"{_PREFIX}{name}", text, [_MODEL], registry=None)
        self._families.append(family)
        return family.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"{_PREFIX}{name}", text, [_MODEL], registry=None)
        self._families.append(family)
        return family.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(f"{_PREFIX}{name}", text, [_MODEL], registry=None, buckets=buckets)
        self._families.append(family)
        return family.labels(self._model)

    def facts(self) -> dict[str, float]:
        """Tell the newest values of some, for those who look."""
        told = {
            "texts in the batch": self.running,
            "requests that wait": self.waiting,
            "cache in use": self.cache_usage,
            "tokens made": self.generation_tokens,
            "tokens of prompts": self.prompt_tokens,
            "engines started again": self.restarts,
        }
        return {name: next(iter(child.collect())).samples[0].value for name, child in told.items()}

    def collect(self) -> Iterable[Metric]:
        """Give all families."""
        for family in self._families:
            yield from family.collect()

    def stepped(self, figures: Sequence[float]) -> None:
        """Take the figures of a step; see ``Engine.step``.

        Raises:
            ValueError: they are none.
        """
        seconds, size, running, waiting, used, rebuilds, suspensions = figures
        if size:
            self.step.observe(seconds)
            self.batch.observe(size)
        self.running.set(running)
        self.waiting.set(waiting)
        self.cache_usage.set(used)
        if rebuilds > self._rebuilds:
            self.restarts.inc(rebuilds - self._rebuilds)
        if suspensions > self._suspensions:
            self.preemptions.inc(suspensions - self._suspensions)
        self._rebuilds, self._suspensions = rebuilds, suspensions

    def lost(self) -> None:
        """Note that there is no process."""
        self.restarts.inc()
        self.rest()

    def rest(self) -> None:
        """Note that nothing is made, and nothing waits."""
        self._rebuilds = self._suspensions = 0.0
        for gauge in (self.running, self.waiting, self.cache_usage):
            gauge.set(0)

    def finished(self, why: Finish | str, seconds: float, tokens: int) -> None:
        """Note that a request has ended, with so many tokens."""
        reason = why if isinstance(why, str) else why.value
        self._finished.labels(self._model, reason).inc()
        self.request.observe(seconds)
        if reason == CANCELLED:
            self.cancelled_tokens.inc(tokens)
