"""What a trace shows of a text that is made."""

from __future__ import annotations

import pytest

from ovmstrio.core.tracing import current_span
from ovmstrio.observability.tracing.recent import RecentTraces
from ovmstrio.observability.tracing.spans import RecordedSpan
from ovmstrio.runtimes.generation.generation_span import GenerationSpan


@pytest.mark.parametrize("state", ["", "other=1,ovms=steps"])
def test_its_phases_are_parts_of_it_and_its_steps_events_if_the_caller_asks(state: str) -> None:
    """The figures of OpenTelemetry's conventions stand at the call as well."""
    recent = RecentTraces()
    call = RecordedSpan("chat m", [recent], 0xAB, state=state, kind="server")
    with call.as_current():
        assert current_span.get() is call
        text = GenerationSpan(call)
        text.prompted(7, 3)
        for tokens in (1, 2, 0):
            text.came(0, tokens)
        text.end(3, "stop")
    call.end()

    (trace,) = recent.traces()
    names = {span.span_id: span.name for span in trace.spans}
    assert [(span.name, names.get(span.parent_id, "")) for span in trace.spans] == [
        ("queue", "generation"),
        ("prefill", "generation"),
        ("decode", "generation"),
        ("generation", "chat m"),
        ("chat m", ""),
    ]
    generation, root = trace.spans[3:]
    figures = {
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": "stop",
    }
    assert generation.attributes == root.attributes == figures
    steps = [(name, told["ovmstrio.tokens"]) for name, _, told in generation.events]
    assert steps == ([("step", 1), ("step", 2)] if state else [])


def test_a_text_whose_caller_left_is_one_that_was_cancelled() -> None:
    """Wherever it was."""
    recent = RecentTraces()
    call = RecordedSpan("chat m", [recent], 0xAB, kind="server")
    GenerationSpan(call).end(0, None)
    call.end()

    (trace,) = recent.traces()
    assert [span.name for span in trace.spans] == ["queue", "generation", "chat m"]
    assert trace.spans[1].attributes["ovmstrio.cancelled"] is True
