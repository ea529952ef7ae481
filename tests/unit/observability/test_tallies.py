"""Counters and histograms of our own, as a scraper sees them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ovmstrio.core.metric_families import Family
from ovmstrio.observability.tallies import Counts, Spreads

LABELS = ("name", "version")
SPREAD = Family("took_us", "histogram", LABELS, "How long.", buckets=(10.0, 18.0, 32.5))
COUNTED = Family("asked", "counter", LABELS, "How often.")


@given(st.lists(st.tuples(st.sampled_from(["a", 'b"\\']), st.integers(0, 400))))
def test_they_print_as_the_librarys_own(seen: list[tuple[str, int]]) -> None:
    """Bounds belong to their buckets, and what was never asked has its head alone."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, spread = Counts(COUNTED), Spreads(SPREAD)
    for made in (count, spread):
        ours.register(made)
    counter = Counter(COUNTED.name, COUNTED.help, LABELS, registry=theirs)
    histogram = Histogram(SPREAD.name, SPREAD.help, LABELS, buckets=SPREAD.buckets, registry=theirs)
    for name, eighths in seen:
        value = eighths / 8
        for each in (count, counter):
            each.labels(name, "1").inc()
        for every in (spread, histogram):
            every.labels(name, "1").observe(value)

    assert generate_latest(ours) == generate_latest(theirs)
    for name in ("took_us_bucket", "asked_total"):
        only = [name]
        assert generate_latest(ours.restricted_registry(only)) == generate_latest(theirs.restricted_registry(only))
