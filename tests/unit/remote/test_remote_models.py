from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trio.testing import MockClock

from ovmstrio.config.config_file import parse_config
from ovmstrio.config.remote_entries import RemoteAddress, RemoteSpec
from ovmstrio.config.specs import ModelSpec, ServerSpec
from ovmstrio.core.errors import ConfigError, DeadlineExceeded, InvalidRequest, NotReady, PayloadTooLarge, ServerError
from ovmstrio.core.request import InferRequest, InferResponse, ParameterValue
from ovmstrio.core.service import on_readiness_changed
from ovmstrio.core.tensor import RawTensor
from ovmstrio.remote.endpoint import NotSent, RemoteDescription
from ovmstrio.remote.servable import RemoteServable, hedge
from ovmstrio.remote.targets import CircuitBreaker, SequenceStep, Target, Targets, watch_health
from ovmstrio.server.kinds import KINDS

Script = Callable[[InferRequest, float], Awaitable[InferResponse]]


async def _answer(request: InferRequest, seconds: float) -> InferResponse:
    return InferResponse("far", "7", [], request.id)


class _FakeEndpoint:
    def __init__(self, address: str, script: Script = _answer) -> None:
        self.address = address
        self.script = script
        self.calls: list[InferRequest] = []
        self.seconds: list[float] = []

    async def infer(self, request: InferRequest, seconds: float) -> InferResponse:
        self.calls.append(request)
        self.seconds.append(seconds)
        return await self.script(request, seconds)

    async def describe(self) -> RemoteDescription:
        return RemoteDescription("fake", (), ())

    async def unready_reason(self) -> str:
        return ""

    def doubt(self) -> None: ...

    async def aclose(self) -> None: ...


def _remote_of(*endpoints: _FakeEndpoint, **settings: Any) -> RemoteServable:
    addresses = (RemoteAddress("grpc", "127.0.0.1", 9),)
    spec = RemoteSpec(name="m", remote_name="far", base_path=Path("/"), addresses=addresses, **settings)
    targets = [Target(each, CircuitBreaker(spec.breaker.failures, spec.breaker.open_seconds)) for each in endpoints]
    return RemoteServable(spec, RemoteDescription("fake", (), ()), Targets(targets))


async def test_calls_that_no_server_answers_are_counted() -> None:
    scripts = [NotSent("refused"), NotReady("lost"), InvalidRequest("wrong")]
    addresses = (RemoteAddress("grpc", "127.0.0.1", 9),)
    spec = RemoteSpec(name="m", remote_name="far", base_path=Path("/"), addresses=addresses, max_attempts=1)
    counts = []
    for error in scripts:
        counted: list[None] = []
        targets = Targets([Target(_FakeEndpoint("a", _raise(error)), CircuitBreaker(1, 10))])
        remote = RemoteServable(spec, RemoteDescription("fake", (), ()), targets, partial(counted.append, None))
        with pytest.raises(type(error).__mro__[1] if type(error) is NotSent else type(error)):
            await remote.infer(_request())
        counts.append(len(counted))
    assert counts == [1, 1, 0]


def _raise(error: ServerError) -> Script:
    async def script(request: InferRequest, seconds: float) -> InferResponse:
        raise error

    return script


async def _hang(request: InferRequest, seconds: float) -> InferResponse:
    await trio.sleep_forever()
    raise AssertionError


def _request(deadline: float = 1e9, **parameters: ParameterValue) -> InferRequest:
    return InferRequest("m", id="i", parameters=parameters, deadline=deadline)


async def test_a_response_has_the_local_name_and_the_request_id() -> None:
    endpoint = _FakeEndpoint("a")
    response = await _remote_of(endpoint, timeout_seconds=5).infer(_request())
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "i")
    assert endpoint.seconds == [pytest.approx(5, abs=0.1)]


async def test_an_unsent_call_goes_to_the_next_address_at_once(autojump_clock: MockClock) -> None:
    unreachable, healthy = _FakeEndpoint("a", _raise(NotSent("refused"))), _FakeEndpoint("b")
    remote = _remote_of(unreachable, healthy)
    begun = trio.current_time()
    for _ in range(4):
        await remote.infer(_request())
    assert trio.current_time() == begun
    assert len(unreachable.calls) == 1
    assert remote.unready_reason == ""


async def test_all_addresses_are_tried_again_after_a_pause_up_to_a_bound(autojump_clock: MockClock) -> None:
    unreachable = _FakeEndpoint("a", _raise(NotSent("a cannot be reached: refused")))
    remote = _remote_of(unreachable, max_attempts=3, retry_pause_ms=1000)
    begun = trio.current_time()
    with pytest.raises(NotReady, match="refused") as caught:
        await remote.infer(_request())
    assert type(caught.value) is NotReady
    assert len(unreachable.calls) == 3
    assert 1.5 <= trio.current_time() - begun <= 3
    assert remote.unready_reason == 'remote model "m": a: a cannot be reached: refused'


@pytest.mark.parametrize("error", [NotReady("broke"), InvalidRequest("wrong")])
async def test_a_sent_call_is_not_retried(error: ServerError) -> None:
    first, second = _FakeEndpoint("a", _raise(error)), _FakeEndpoint("b", _raise(error))
    with pytest.raises(type(error), match=error.message):
        await _remote_of(first, second).infer(_request())
    assert len(first.calls) + len(second.calls) == 1


async def test_failures_in_a_row_suspend_an_address(autojump_clock: MockClock) -> None:
    endpoint = _FakeEndpoint("a", _raise(InvalidRequest("wrong")))
    remote = _remote_of(endpoint, breaker={"failures": 2, "open_seconds": 10})
    for error in (*[InvalidRequest("wrong")] * 5, NotReady("broke"), NotReady("broke")):
        endpoint.script = _raise(error)
        with pytest.raises(type(error)):
            await remote.infer(_request())
    with pytest.raises(
        NotReady, match=r'"m" is not available: a: circuit open for 10.0 s after 2 consecutive failures'
    ):
        await remote.infer(_request())
    assert len(endpoint.calls) == 7
    assert "circuit open" in remote.unready_reason
    await trio.sleep(10)
    endpoint.script = _answer
    await remote.infer(_request())
    assert remote.unready_reason == ""


async def test_only_the_configured_timeout_counts_as_a_failure(autojump_clock: MockClock) -> None:
    endpoint = _FakeEndpoint("a", _hang)
    remote = _remote_of(endpoint, timeout_seconds=5, breaker={"failures": 1, "open_seconds": 10})
    for _ in range(3):
        with pytest.raises(DeadlineExceeded, match='a did not answer for "m" in time'):
            await remote.infer(_request(trio.current_time() + 1))
    assert remote.unready_reason == ""
    with pytest.raises(DeadlineExceeded):
        await remote.infer(_request())
    assert "circuit open" in remote.unready_reason


async def test_a_slow_call_is_hedged_and_a_sequence_is_not(autojump_clock: MockClock) -> None:
    slow, quick = _FakeEndpoint("a", _hang), _FakeEndpoint("b")
    remote = _remote_of(slow, quick, hedge_after_ms=100, timeout_seconds=5)
    for _ in range(4):
        await remote.infer(_request())
    assert len(slow.calls) == 2
    quick.script = _hang
    with pytest.raises(DeadlineExceeded):
        await remote.infer(_request(sequence_id=7, sequence_start=True))
    assert len(slow.calls) + len(quick.calls) == 2 + 4 + 1
    single = _FakeEndpoint("a", _hang)
    with pytest.raises(DeadlineExceeded):
        await _remote_of(single, hedge_after_ms=100, timeout_seconds=5).infer(_request())
    assert len(single.calls) == 2


async def test_a_sequence_with_a_server_id_stays_at_its_address() -> None:
    async def begin(request: InferRequest, seconds: float) -> InferResponse:
        response = await _answer(request, seconds)
        if "sequence_start" in request.parameters:
            response.outputs.append(RawTensor("sequence_id", "UINT64", (1,), (99).to_bytes(8, "little")))
        return response

    endpoints = [_FakeEndpoint(name, begin) for name in "abc"]
    remote = _remote_of(*endpoints)
    await remote.infer(_request(sequence_start=True, sequence_id=0))
    (home,) = [each for each in endpoints if each.calls]
    for _ in range(5):
        await remote.infer(_request(sequence_id=99))
    assert [len(each.calls) for each in endpoints if each is not home] == [0, 0]


async def test_a_response_above_the_limit_is_refused_with_its_size() -> None:
    async def script(request: InferRequest, seconds: float) -> InferResponse:
        response = await _answer(request, seconds)
        response.outputs.append(RawTensor("o", "UINT8", (100,), bytes(100)))
        return response

    request = _request()
    request.max_output_bytes = 99
    with pytest.raises(PayloadTooLarge, match="100 bytes"):
        await _remote_of(_FakeEndpoint("a", script)).infer(request)


# Choice of address


def _targets(count: int) -> Targets:
    return Targets([Target(_FakeEndpoint(f"grpc://h{number}:1"), CircuitBreaker(1, 10)) for number in range(count)])


def test_healthy_addresses_take_turns() -> None:
    targets = _targets(3)
    a, b, c = targets.all
    assert {targets.choose(0) for _ in range(3)} == {a, b, c}
    b.failure_reason = "gone"
    assert all(targets.choose(0) is not b for _ in range(6))
    assert targets.choose(0, {a, c}) is b
    c.breaker.fail(0)
    assert {targets.choose(0) for _ in range(6)} == {a}
    assert targets.choose(0, {a, b}) is None


def test_an_obstacle_needs_all_addresses_to_fail() -> None:
    targets = _targets(2)
    targets.all[0].failure_reason = "refused"
    assert targets.unready_reason(0) == ""
    targets.all[1].breaker.fail(0)
    expected = "grpc://h0:1: refused; grpc://h1:1: circuit open for 7.0 s after 1 consecutive failures"
    assert targets.unready_reason(3) == expected


@given(st.lists(st.integers(1, 2**64 - 1) | st.text(min_size=1), min_size=1, max_size=20), st.data())
def test_a_sequence_stays_at_its_first_address(ids: list[int | str], data: st.DataObject) -> None:
    targets = _targets(4)
    began = {}
    for each in ids:
        for target in targets.all:
            target.failure_reason = data.draw(st.sampled_from(["", "", "gone"]))
        began[each] = targets.target_of_sequence(SequenceStep(each, starts=True, ends=False), 0)
        if any(not target.failure_reason for target in targets.all):
            assert not began[each].failure_reason
    for target in targets.all:
        target.failure_reason = data.draw(st.sampled_from(["", "gone"]))
    for each, target in began.items():
        assert targets.target_of_sequence(SequenceStep(each, starts=False, ends=False), 0) is target


def test_addresses_of_sequences_follow_from_their_ids() -> None:
    first, second = _targets(5), _targets(5)
    for number in range(1, 200):
        begun = first.target_of_sequence(SequenceStep(number, starts=True, ends=False), 0)
        found = second.target_of_sequence(SequenceStep(number, starts=False, ends=False), 0)
        assert begun.endpoint.address == found.endpoint.address


# Hedging


class _Calls:
    def __init__(self, *calls: tuple[float, str | ServerError]) -> None:
        self._calls = iter(calls)
        self.begun = 0
        self.cancelled = 0

    async def __call__(self) -> str:
        self.begun += 1
        seconds, outcome = next(self._calls)
        try:
            await trio.sleep(seconds)
        except trio.Cancelled:
            self.cancelled += 1
            raise
        if isinstance(outcome, ServerError):
            raise outcome
        return outcome


@pytest.mark.parametrize(
    ("calls", "outcome", "seconds", "cancelled"),
    [
        pytest.param([(0.5, "a")], "a", 0.5, 0, id="an early answer"),
        pytest.param([(0.5, NotReady("gone"))], NotReady("gone"), 0.5, 0, id="an early failure"),
        pytest.param([(100, "slow"), (1, "second")], "second", 2, 1, id="the second answers first"),
        pytest.param([(1.5, "first"), (100, "slow")], "first", 1.5, 1, id="the first answers first"),
        pytest.param([(5, "late"), (1, NotReady("second"))], "late", 5, 0, id="a failure waits"),
        pytest.param([(2, NotReady("first")), (5, NotReady("second"))], NotReady("first"), 6, 0, id="two failures"),
        pytest.param(
            [(100, "never"), (1, InvalidRequest("wrong"))], InvalidRequest("wrong"), 2, 1, id="a final failure"
        ),
    ],
)
async def test_the_first_answer_or_final_failure_cancels_the_other_call(
    calls: list[tuple[float, str | ServerError]],
    outcome: str | ServerError,
    seconds: float,
    cancelled: int,
    autojump_clock: MockClock,
) -> None:
    made, begun = _Calls(*calls), trio.current_time()
    found: str | ServerError
    try:
        found = await hedge(made, 1, is_final=lambda error: isinstance(error, InvalidRequest))
    except ServerError as error:
        found = error
    assert (type(found), str(found)) == (type(outcome), str(outcome))
    assert (trio.current_time() - begun, made.begun, made.cancelled) == (seconds, len(calls), cancelled)


# Health


class _Restarted(_FakeEndpoint):
    is_well = False

    async def describe(self) -> RemoteDescription:
        if not self.is_well:
            raise NotReady("gone")
        return await super().describe()

    async def unready_reason(self) -> str:
        return (await self.describe()).platform if not self.is_well else ""


async def test_readiness_changes_with_the_health_of_an_address(autojump_clock: MockClock) -> None:
    endpoint = _Restarted("a")
    target = Target(endpoint, CircuitBreaker(1, 1.0))
    seen: list[str] = []

    async def well(_: Target) -> str:
        return ""

    with on_readiness_changed(lambda: seen.append(target.unready_reason(trio.current_time()))):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch_health, target, "m", 10.0, well)
            await trio.sleep(10.5)
            assert seen == ["a: gone"]
            endpoint.is_well = True
            await trio.sleep(10)
            assert seen == ["a: gone", ""]
            nursery.cancel_scope.cancel()


# Circuit breaker


def test_a_breaker_without_a_limit_never_opens() -> None:
    breaker = CircuitBreaker(0, 10)
    for _ in range(1000):
        breaker.begin()
        breaker.fail(0)
    assert breaker.allows(0)


class _BreakerModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(3, 10)
        self.now = 0.0
        self.in_row = 0
        self.closed_until_failure = True
        self.opened = 0.0
        self.ongoing: list[bool] = []

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now) and not self.ongoing)
    @rule()
    def begin(self) -> None:
        self.breaker.begin()
        self.ongoing.append(True)

    @precondition(lambda self: self.ongoing)
    @rule()
    def succeed(self) -> None:
        self.ongoing.pop()
        self.breaker.succeed()
        self.in_row, self.closed_until_failure = 0, True

    @precondition(lambda self: self.ongoing)
    @rule()
    def abandon(self) -> None:
        self.ongoing.pop()
        self.breaker.abandon()

    @precondition(lambda self: self.ongoing)
    @rule()
    def fail(self) -> None:
        self.ongoing.pop()
        self.breaker.fail(self.now)
        self.in_row += 1
        if self.in_row >= 3 or not self.closed_until_failure:
            self.closed_until_failure, self.opened = False, self.now

    @invariant()
    def is_open_for_as_long_as_configured(self) -> None:
        is_over = not self.ongoing and self.now >= self.opened + 10
        assert self.breaker.allows(self.now) == (self.closed_until_failure or is_over)
        assert self.breaker.consecutive_failures == self.in_row


TestBreaker = _BreakerModel.TestCase


# Entries of the configuration


def _parse(*configs: dict[str, Any]) -> ServerSpec:
    document = {"model_config_list": [{"config": each} for each in configs]}
    return parse_config(KINDS.values(), json.dumps(document, indent=1).encode(), Path("/etc/ovms/config.json"))


def _remote(**settings: Any) -> RemoteSpec:
    (spec,) = _parse({"name": "m", "remote": "grpc://h:9000", **settings}).of(RemoteSpec)
    return spec


def test_an_entry_has_defaults_and_all_settings() -> None:
    usual = _remote()
    assert (usual.addresses, usual.remote_name) == ((RemoteAddress("grpc", "h", 9000),), "m")
    assert (usual.hedge_after_ms, usual.max_concurrency, usual.problems) == (0, 256, ())
    spec = _remote(
        remote=["grpcs://a:1", "https://[::1]:2"],
        remote_name="far",
        remote_version=3,
        timeout_seconds=2,
        hedge_after_ms=40,
        max_concurrency=7,
        breaker={"failures": 2},
        tls={"ca": "ca.pem", "server_name": "s"},
    )
    assert [str(address) for address in spec.addresses] == ["grpcs://a:1", "https://[::1]:2"]
    assert (spec.remote_name, spec.remote_version, spec.timeout_seconds) == ("far", "3", 2)
    assert (spec.breaker.failures, spec.breaker.open_seconds, spec.max_concurrency) == (2, 10, 7)
    assert spec.tls.ca == Path("/etc/ovms/ca.pem")
    assert usual.needs_reload(spec)


@pytest.mark.parametrize("address", ["h:9000", "ftp://h:1", "grpc://h", "grpc://:1", "grpc://h:1/v2", "grpc://h:99999"])
def test_an_invalid_address_is_refused_with_its_line(address: str) -> None:
    served = _parse({"name": "m", "remote": address}, {"name": "n", "base_path": "n"})
    (spec,) = served.of(RemoteSpec)
    (problem,) = spec.errors
    assert (problem.line, problem.path) == (6, "model_config_list[0].config.remote")
    assert "grpc://HOST:PORT" in problem.expected
    assert [each.name for each in served.of(ModelSpec)] == ["n"]


def test_all_problems_are_reported_together() -> None:
    spec = _remote(remote=["x", "grpc://a:1", "grpc://a:1"], breaker={"failures": -1, "open": 1}, tls={"ca": 3})
    paths = [problem.path.rpartition("config.")[2] for problem in spec.errors]
    assert paths == ["remote", "remote", "breaker.open", "breaker.failures", "tls.ca"]


def test_keys_of_local_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"base_path.*no local files"):
        _remote(base_path="x")
    with pytest.raises(ConfigError, match=r"the value cannot be used"):
        _remote(max_attempts=0)


def test_a_duplicate_name_is_left_out() -> None:
    served = _parse({"name": "m", "remote": "grpc://a:1"}, {"name": "m", "remote": "grpc://b:1"})
    assert [each.addresses[0].host for each in served.of(RemoteSpec)] == ["a"]
    assert any("ignored" in problem.message for problem in served.problems)
