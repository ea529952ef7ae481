"""Traces of calls: spans, which of them are recorded, and where they go.

::

    CallEvent ──> CallTracing ── TraceSampling ──> RecordedSpan ──┬─> RecentTraces    read by the console
                                     │                       └─> exporting       OTLP, where OTEL_* say so
                                     └──────> QuietSpan      ids for logs and for what is called

Nothing here but ``otel/`` imports OpenTelemetry.
"""
