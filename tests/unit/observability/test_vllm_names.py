"""Metrics of models of text under vLLM's names."""

from __future__ import annotations

import re

from ovmstrio.core.generation import Finish
from ovmstrio.observability.metrics import Metrics
from ovmstrio.runtimes.generation.text_metrics import CANCELLED, TextMetrics


def _told(metrics: Metrics) -> dict[str, float]:
    lines = re.findall(r"(?m)^(vllm:\w+(?:{.*})?) (\S+)$", metrics.render().decode())
    return {name: float(value) for name, value in lines}


def _counted() -> TextMetrics:
    """Have a model make texts."""
    text = TextMetrics("m")
    for gauge, value in ((text.running, 3), (text.waiting, 2), (text.cache_usage, 0.25)):
        gauge.set(value)
    text.generation_tokens.inc(7)
    text.first_token.observe(0.2)
    for why in (Finish.STOP, Finish.LENGTH, "tool_calls", CANCELLED):
        text.finished(why, 0.5, 4)
    return text


def test_they_are_beside_the_servers_own_on_request() -> None:
    """With the numbers of these; ends are those that vLLM tells apart."""
    metrics = Metrics(vllm_names=True)
    with metrics.collecting((_counted(),), ""):
        told = _told(metrics)
        assert b'ovmstrio_llm_requests_running{model_name="m"} 3.0' in metrics.render()
    label = 'engine="0",model_name="m"'
    assert told[f"vllm:num_requests_running{{{label}}}"] == 3
    assert told[f"vllm:num_requests_waiting{{{label}}}"] == 2
    assert told[f"vllm:kv_cache_usage_perc{{{label}}}"] == 0.25
    assert told[f"vllm:generation_tokens_total{{{label}}}"] == 7
    assert told[f"vllm:time_to_first_token_seconds_count{{{label}}}"] == 1
    assert told['vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="m"}'] == 1
    ends = {
        reason: told[f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}']
        for reason in ("stop", "length", "abort")
    }
    assert ends == {"stop": 2, "length": 1, "abort": 1}


def test_without_being_asked_for_they_are_not_there() -> None:
    """The server's own names are enough."""
    metrics = Metrics()
    with metrics.collecting((_counted(),), ""):
        assert _told(metrics) == {}


def test_families_of_services_can_be_asked_for_by_name() -> None:
    """Alone, like the server's; no other one comes with them."""
    metrics = Metrics()
    with metrics.collecting((_counted(),), ""):
        text = metrics.render(["ovmstrio_llm_generation_tokens", "ovmstrio_llm_requests_waiting"]).decode()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert samples == [
        'ovmstrio_llm_requests_waiting{model_name="m"} 2.0',
        'ovmstrio_llm_generation_tokens_total{model_name="m"} 7.0',
    ]
