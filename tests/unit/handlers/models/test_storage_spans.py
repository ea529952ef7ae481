"""What is asked of storages, as traces show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest
import trio

from ovmstrio.core.errors import ServerError
from ovmstrio.core.tracing import spans_of_server
from ovmstrio.observability.tracing.call_tracing import CallTracing
from ovmstrio.observability.tracing.sampling import TraceSampling
from ovmstrio.observability.tracing.spans import RecordedSpan
from tests.support.model_projects import Loads, library_over, models_in

PLACE = "memory://traced/models"


@dataclass
class _Sink:
    spans: list[RecordedSpan] = field(default_factory=list)

    def span_ended(self, span: RecordedSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def place() -> Iterator[None]:
    """Keep two models in a storage that fsspec reaches."""
    files = fsspec.filesystem("memory")
    for name in ("a", "b"):
        files.pipe(f"/traced/models/{name}/1/model.txt", name.encode())
    yield
    files.rm("/traced", recursive=True)


def _traced(sink: _Sink, sampler: str = "always_on") -> CallTracing:
    sinks = [sink]
    return CallTracing(TraceSampling(sampler), sinks, is_failure=lambda _: True, of_server=sinks)


@pytest.mark.usefixtures("place")
async def test_what_no_call_asks_of_a_storage_is_traced_by_itself(tmp_path: Path) -> None:
    """A listing, and each model that is fetched as the storage has it."""
    sink = _Sink()
    spans_of_server.set(_traced(sink).of_server)
    async with library_over(models_in(PLACE), tmp_path, Loads()):
        pass
    assert sorted(span.name for span in sink.spans) == ["fetch model", "fetch model", "list models"]
    assert {span.kind for span in sink.spans} == {"client"}
    assert {span.attributes["url.full"] for span in sink.spans} == {PLACE}
    fetched = [span.attributes for span in sink.spans if span.name == "fetch model"]
    assert sorted(str(told["ovmstrio.model.name"]) for told in fetched) == ["a", "b"]
    assert len({span.trace for span in sink.spans}) == 3


@pytest.mark.usefixtures("place")
async def test_a_model_that_a_call_waits_for_is_fetched_in_its_trace(tmp_path: Path) -> None:
    """Whichever thread it is fetched in."""
    sink = _Sink()
    async with library_over(models_in(PLACE, 1, 1), tmp_path, Loads()) as library:
        call = RecordedSpan("the call", [sink], 7)
        with call.as_current():
            assert (await library.client.aget_model("a")).text == "a"
    (span,) = sink.spans
    assert (span.name, span.trace, span.parent) == ("fetch model", 7, call.number)


async def test_what_fails_is_recorded_though_it_is_not_sampled() -> None:
    """And what is below it has its trace, and is not recorded; what is cancelled has not failed."""
    sink = _Sink()
    tracing = _traced(sink, "always_off")
    with tracing.of_server("fine", {}):
        pass
    with pytest.raises(ServerError, match="no"), tracing.of_server("fails", {"url.full": "s3://a"}):
        raise ServerError("no")
    with trio.CancelScope() as scope, tracing.of_server("is left", {}):
        scope.cancel()
        await trio.lowlevel.checkpoint()
    (span,) = sink.spans
    assert (span.name, span.failure, span.attributes["url.full"]) == ("fails", "no", "s3://a")
    assert spans_of_server.get() is None


@pytest.mark.parametrize(
    ("location", "told"), [("memory://me:secret@traced/models?token=secret", "memory://traced/models")]
)
async def test_no_secret_of_a_location_is_told(tmp_path: Path, location: str, told: str) -> None:
    """Be it before the host or behind the path."""
    sink = _Sink()
    call = RecordedSpan("the call", [sink], 7)
    with call.as_current():
        async with library_over(models_in(location), tmp_path, Loads()):
            pass
    assert {span.attributes["url.full"] for span in sink.spans} == {told}
