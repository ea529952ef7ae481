"""Metrics of models of text under the names that vLLM has for them, beside the server's own, for what reads those."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.core import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["with_vllm_names"]

_OWN: Final = "ovmstrio_llm_"
_ENGINE: Final = {"engine": "0"}
"""A label that vLLM has, which counts the engines of a model."""

_NAMES: Final[Mapping[str, str]] = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "kv_cache_usage": "kv_cache_usage_perc",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "queue_time_seconds": "request_queue_time_seconds",
    "preemptions": "num_preemptions",
}
"""Families that differ in their names alone, as vLLM writes them behind ``vllm:``."""

_FINISHED: Final = "requests_finished"
_REASONS: Final[Mapping[str, str]] = {"tool_calls": "stop", "cancelled": "abort"}
"""Ends that vLLM calls otherwise, or does not tell apart."""


def with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """Give families, and behind each that vLLM has as well the same under its name there."""
    for family in families:
        yield family
        own = family.name.removeprefix(_OWN)
        if own == _FINISHED:
            yield _finished(family)
        elif own in _NAMES:
            yield _renamed(family, f"vllm:{_NAMES[own]}")


def _renamed(family: Metric, name: str) -> Metric:
    made = Metric(name, family.documentation, family.type)
    made.samples = [
        each._replace(name=each.name.replace(family.name, name, 1), labels=each.labels | _ENGINE)
        for each in family.samples
    ]
    return made


def _finished(family: Metric) -> Metric:
    """Count requests by vLLM's reasons."""
    numbers: Counter[tuple[str, str]] = Counter()
    for each in family.samples:
        if each.name.endswith("_total"):
            reason = each.labels["finish_reason"]
            numbers[each.labels["model_name"], _REASONS.get(reason, reason)] += int(each.value)
    made = Metric("vllm:request_success", family.documentation, "counter")
    for (model, reason), number in numbers.items():
        labels = {"model_name": model, "finished_reason": reason} | _ENGINE
        made.add_sample("vllm:request_success_total", labels, number)
    return made
