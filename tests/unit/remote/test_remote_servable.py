"""Attempts at a call of another server: where, how often, and what failures mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from ovmstrio.core.begun import telling_begin
from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, NotReady, PayloadTooLarge, ServerError
from ovmstrio.core.request import InferRequest, InferResponse, ParameterValue
from ovmstrio.core.tensor import RawTensor
from ovmstrio.runtimes.remote.endpoint import NotSent
from tests.support.remote_endpoints import FakeEndpoint, answer, remote_of

Script = Callable[[InferRequest, float], Awaitable[InferResponse]]


def raising(error: ServerError) -> Script:
    """Make a script that fails."""

    async def script(request: InferRequest, seconds: float) -> InferResponse:
        del request, seconds
        raise error

    return script


async def hang(request: InferRequest, seconds: float) -> InferResponse:
    """Never answer."""
    del request, seconds
    await trio.sleep_forever()
    raise AssertionError


def _request(deadline: float = 1e9, **parameters: ParameterValue) -> InferRequest:
    return InferRequest("m", id="i", parameters=parameters, deadline=deadline)


async def test_an_answer_has_the_names_of_this_server() -> None:
    """And the id of the request; the address is told how much time is left."""
    endpoint = FakeEndpoint("a")
    response = await remote_of(endpoint, timeout_seconds=5).infer(_request())
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "i")
    assert endpoint.seconds == [pytest.approx(5, abs=0.1)]


async def test_calls_are_not_made_again_by_others() -> None:
    """What another server does may not be the same twice, so whoever might make a call again is told."""
    told: list[int] = []
    endpoint = FakeEndpoint("a")
    with telling_begin(lambda: told.append(len(endpoint.calls))):
        await remote_of(endpoint).infer(_request())
    assert told == [0]


async def test_what_was_not_sent_goes_to_the_next_address_at_once(autojump_clock: MockClock) -> None:
    """The address that was not reached is passed over from then on."""
    del autojump_clock
    gone, well = FakeEndpoint("a", raising(NotSent("refused"))), FakeEndpoint("b")
    remote = remote_of(gone, well)
    begun = trio.current_time()
    for _ in range(4):
        await remote.infer(_request())
    assert trio.current_time() == begun
    assert len(gone.calls) == 1
    assert remote.obstacle == ""


async def test_all_addresses_are_tried_again_after_a_pause_up_to_a_bound(autojump_clock: MockClock) -> None:
    """The pause is half to all of what is configured, and twice that the next time."""
    del autojump_clock
    gone = FakeEndpoint("a", raising(NotSent("a cannot be reached: refused")))
    remote = remote_of(gone, max_attempts=3, retry_pause_ms=1000)
    begun = trio.current_time()
    with pytest.raises(NotReady, match="refused") as caught:
        await remote.infer(_request())
    assert type(caught.value) is NotReady
    assert len(gone.calls) == 3
    assert 1.5 <= trio.current_time() - begun <= 3
    assert remote.obstacle == 'remote model "m": a: a cannot be reached: refused'


@pytest.mark.parametrize("error", [NotReady("broke"), InvalidRequest("wrong")])
async def test_what_was_sent_is_not_sent_again(error: ServerError) -> None:
    """Nobody knows whether it was done."""
    first, second = FakeEndpoint("a", raising(error)), FakeEndpoint("b", raising(error))
    with pytest.raises(type(error), match=error.message):
        await remote_of(first, second).infer(_request())
    assert len(first.calls) + len(second.calls) == 1


async def test_failures_in_a_row_keep_an_address_from_being_called(autojump_clock: MockClock) -> None:
    """Calls fail at once then, with the reason, until one finds it well again; what callers do wrong does not count."""
    del autojump_clock
    endpoint = FakeEndpoint("a", raising(InvalidRequest("wrong")))
    remote = remote_of(endpoint, breaker={"failures": 2, "open_seconds": 10})
    for error in (*[InvalidRequest("wrong")] * 5, NotReady("broke"), NotReady("broke")):
        endpoint.script = raising(error)
        with pytest.raises(type(error)):
            await remote.infer(_request())
    with pytest.raises(NotReady, match=r'"m" is not called: a: left alone for 10.0 s more, after 2 failures in a row'):
        await remote.infer(_request())
    assert len(endpoint.calls) == 7
    assert "left alone" in remote.obstacle
    await trio.sleep(10)
    endpoint.script = answer
    await remote.infer(_request())
    assert remote.obstacle == ""


async def test_a_deadline_ends_the_call_and_only_the_servers_own_counts_as_a_failure(autojump_clock: MockClock) -> None:
    """A caller in a hurry must not close the way for others."""
    del autojump_clock
    endpoint = FakeEndpoint("a", hang)
    remote = remote_of(endpoint, timeout_seconds=5, breaker={"failures": 1, "open_seconds": 10})
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match='a did not answer for "m" in time'):
            await remote.infer(_request(trio.current_time() + 1))
    assert remote.obstacle == ""
    with pytest.raises(DeadlineExceeded):
        await remote.infer(_request())
    assert "left alone" in remote.obstacle


async def test_a_call_that_takes_long_is_made_at_another_address(autojump_clock: MockClock) -> None:
    """The first answer counts; a sequence is never called twice."""
    del autojump_clock
    slow, quick = FakeEndpoint("a", hang), FakeEndpoint("b")
    remote = remote_of(slow, quick, hedge_after_ms=100, timeout_seconds=5)
    for _ in range(4):
        await remote.infer(_request())
    assert len(slow.calls) == 2
    quick.script = hang
    with pytest.raises(DeadlineExceeded):
        await remote.infer(_request(sequence_id=7, sequence_start=True))
    assert len(slow.calls) + len(quick.calls) == 2 + 4 + 1


async def test_a_hedge_with_one_address_goes_there_again(autojump_clock: MockClock) -> None:
    """There may be several servers behind it."""
    del autojump_clock
    endpoint = FakeEndpoint("a", hang)
    with pytest.raises(DeadlineExceeded):
        await remote_of(endpoint, hedge_after_ms=100, timeout_seconds=5).infer(_request())
    assert len(endpoint.calls) == 2


async def test_a_sequence_stays_at_its_address_also_with_an_id_that_the_server_chose() -> None:
    """All its steps go there, and none elsewhere."""

    async def begin(request: InferRequest, seconds: float) -> InferResponse:
        response = await answer(request, seconds)
        if "sequence_start" in request.parameters:
            response.outputs.append(RawTensor("sequence_id", "UINT64", (1,), (99).to_bytes(8, "little")))
        return response

    endpoints = [FakeEndpoint(name, begin) for name in "abc"]
    remote = remote_of(*endpoints)
    await remote.infer(_request(sequence_start=True, sequence_id=0))
    (home,) = [each for each in endpoints if each.calls]
    for _ in range(5):
        await remote.infer(_request(sequence_id=99))
    assert [len(each.calls) for each in endpoints if each is not home] == [0, 0]


async def test_an_answer_that_is_too_large_is_refused() -> None:
    """With its size."""

    async def script(request: InferRequest, seconds: float) -> InferResponse:
        response = await answer(request, seconds)
        response.outputs.append(RawTensor("o", "UINT8", (100,), bytes(100)))
        return response

    request = _request()
    request.most_bytes = 99
    with pytest.raises(PayloadTooLarge, match="100 bytes"):
        await remote_of(FakeEndpoint("a", script)).infer(request)
