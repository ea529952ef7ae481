"""Prometheus metrics of language models; updated on the event loop only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.core import Metric

    from ovmstrio.core.generation import Finish

CANCELLED: Final = "cancelled"
ERROR: Final = "error"
"""Finish reasons in addition to ``Finish``."""

_PREFIX: Final = "ovmstrio_llm_"
_MODEL: Final = "model_name"
_REASON: Final = "finish_reason"
_STEP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_WAIT_BUCKETS: Final = (0.001, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BATCH_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

_FIGURES: Final = 5
"""Figures of a step before its totals."""

_MAX_RECORDED_STEPS: Final = 64
"""Steps that are recorded before the families are updated, which costs less for many steps at once."""


class TextMetrics:
    """Metric families of one model; a collector. Steps are counted when the families are read, or in batches."""

    def __init__(self, model: str) -> None:
        self._families: list[Counter | Gauge | Histogram] = []
        self._model = model
        self.running = self._gauge("requests_running", "Sequences being generated.")
        self.waiting = self._gauge("requests_waiting", "Requests waiting for room in the batch.")
        self.cache_usage = self._gauge("kv_cache_usage", "KV cache usage, 0 to 1.")
        self.cache_bytes = self._gauge("kv_cache_bytes", "KV cache size.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.cancelled_tokens = self._counter("cancelled_tokens", "Generated tokens of cancelled requests.")
        self.restarts = self._counter("engine_restarts", "Restarts of the engine or of its batch.")
        self.draft_tokens = self._counter("draft_tokens", "Tokens proposed by the draft model or by prompt lookup.")
        self.accepted_draft_tokens = self._counter("accepted_draft_tokens", "Proposed tokens that the model accepted.")
        self.acceptance_rate = self._gauge("draft_acceptance_rate", "Accepted part of all proposed tokens, 0 to 1.")
        self.preemptions = self._counter("preemptions", "Sequences preempted because the KV cache was full.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first token.", _WAIT_BUCKETS
        )
        self.next_token = self._histogram(
            "inter_token_latency_seconds", "Time between tokens of a sequence.", _STEP_BUCKETS
        )
        self.request = self._histogram("e2e_request_latency_seconds", "Time from a request to its end.", _WAIT_BUCKETS)
        self.queue = self._histogram(
            "queue_time_seconds", "Time from a request to its admission to the batch.", _WAIT_BUCKETS
        )
        self.step = self._histogram("step_seconds", "Duration of a batch step.", _STEP_BUCKETS)
        self.batch = self._histogram("batch_size", "Sequences in a batch step.", _BATCH_BUCKETS)
        self._finished = Counter(
            f"{_PREFIX}requests_finished", "Finished requests by reason.", [_MODEL, _REASON], registry=None
        )
        self._families.append(self._finished)
        self._totals = (self.restarts, self.preemptions, self.draft_tokens, self.accepted_draft_tokens)
        self._last_totals: Sequence[float] = [0.0] * len(self._totals)
        self._steps: list[Sequence[float]] = []
        self._new_tokens = 0
        self._new_latencies: list[float] = []

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
        """Return the main values, for introspection."""
        self._update()
        gauges = {
            "texts in the batch": self.running,
            "requests that wait": self.waiting,
            "cache in use": self.cache_usage,
            "tokens made": self.generation_tokens,
            "tokens of prompts": self.prompt_tokens,
            "engines started again": self.restarts,
        }
        return {name: next(iter(child.collect())).samples[0].value for name, child in gauges.items()}

    def collect(self) -> Iterable[Metric]:
        """Yield all families."""
        self._update()
        for family in self._families:
            yield from family.collect()

    def stepped(self, figures: Sequence[float]) -> None:
        """Record the figures of a step; see ``Engine.step``.

        Raises:
            ValueError: wrong number of figures.
            TypeError: a figure is not a number.
        """
        if len(figures) != _FIGURES + len(self._totals):
            raise ValueError(f"expected {_FIGURES + len(self._totals)} figures, got {len(figures)}")
        sum(figures)
        self._steps.append(figures)
        if len(self._steps) >= _MAX_RECORDED_STEPS:
            self._update()

    def generated(self, tokens: int, latencies: Sequence[float]) -> None:
        """Record the tokens of a step, and the seconds since the last tokens of their sequences."""
        self._new_tokens += tokens
        self._new_latencies += latencies

    def _update(self) -> None:
        """Update the families with the recorded steps."""
        steps, self._steps = self._steps, []
        for figures in steps:
            self._count_step(figures)
        tokens, self._new_tokens = self._new_tokens, 0
        self.generation_tokens.inc(tokens)
        latencies, self._new_latencies = self._new_latencies, []
        for seconds in latencies:
            self.next_token.observe(seconds)

    def _count_step(self, figures: Sequence[float]) -> None:
        seconds, size, running, waiting, used, *totals = figures
        if size:
            self.step.observe(seconds)
            self.batch.observe(size)
        self.running.set(running)
        self.waiting.set(waiting)
        self.cache_usage.set(used)
        for counter, total, last in zip(self._totals, totals, self._last_totals, strict=True):
            if total > last:
                counter.inc(total - last)
        self._last_totals = totals
        *_, proposed, accepted = totals
        if proposed:
            self.acceptance_rate.set(accepted / proposed)

    def lost(self) -> None:
        """Record the loss of the engine process."""
        self.restarts.inc()
        self.rest()

    def rest(self) -> None:
        """Reset the gauges of the batch."""
        self._update()
        self._last_totals = [0.0] * len(self._totals)
        for gauge in (self.running, self.waiting, self.cache_usage):
            gauge.set(0)

    def finished(self, why: Finish | str, seconds: float, tokens: int) -> None:
        """Record the end of a request with its number of generated tokens."""
        reason = why if isinstance(why, str) else why.value
        self._finished.labels(self._model, reason).inc()
        self.request.observe(seconds)
        if reason == CANCELLED:
            self.cancelled_tokens.inc(tokens)
