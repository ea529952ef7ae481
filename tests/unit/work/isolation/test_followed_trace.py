"""The traces of calls in processes whose environment is the user's own."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest
from opentelemetry import trace

from ovmstrio.work import isolation
from ovmstrio.work.isolation import followed_trace

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_calls_go_on_where_the_packages_that_export_spans_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a protobuf that is too new for them, which is no missing package; it is told once."""
    tried: list[str] = []

    def broken(name: str) -> Any:
        tried.append(name)
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    # Each process has the module's state once, so that the test needs the module as a new process has it.
    monkeypatch.setattr(isolation, "followed_trace", isolation.followed_trace)
    monkeypatch.delitem(sys.modules, followed_trace.__name__)
    fresh = import_module(followed_trace.__name__)
    monkeypatch.setattr(fresh, "import_module", broken)
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    done = []
    for number in range(3):
        with fresh.following_trace("call", PARENT) as fail:
            done.append(number)
            fail("reason")
    assert done == [0, 1, 2]
    assert len(tried) == 1
    told = capsys.readouterr().err
    assert told.count("Descriptors cannot be created directly") == 1
