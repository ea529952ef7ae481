"""What code of users may add to spans of the server's by OpenTelemetry."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace

from ovmstrio.observability.tracing.otel.user_spans import UserSpans
from ovmstrio.observability.tracing.recent import RecentTraces
from ovmstrio.observability.tracing.spans import MOST_EVENTS, RecordedSpan


def _told(recent: RecentTraces) -> dict[str, Any]:
    (kept,) = recent.traces()
    (document,) = json.loads(json.dumps(kept.document()))["tree"]
    found: dict[str, Any] = document
    return found


def test_whatever_code_of_users_tells_is_shown_and_has_a_bound() -> None:
    """Values that no document could have are texts, and long ones are cut."""
    recent = RecentTraces()
    span = RecordedSpan("call", [recent], 7, kind="server")
    before = contexts.get_current()
    UserSpans().enter(span)
    try:
        seen = trace.get_current_span()
        seen.set_attribute("size", object())  # type: ignore[arg-type]
        seen.add_event("came", {"bytes": b"x", "long": "y" * 100_000, "number": 3})
        seen.record_exception(ValueError("z" * 100_000), {"of": {1}})  # type: ignore[dict-item]
        for _ in range(2 * MOST_EVENTS):
            seen.add_link(trace.SpanContext(1, 2, is_remote=False))
    finally:
        UserSpans().leave(before)
    span.end()

    told = _told(recent)
    assert told["attributes"]["size"].startswith("<object")
    came, raised = (event["attributes"] for event in told["events"])
    assert (came["bytes"], came["number"]) == ("b'x'", 3)
    assert raised["of"] == "{1}"
    assert max(len(came["long"]), len(raised["exception.message"])) < 2000
    assert len(told["links"]) == MOST_EVENTS
