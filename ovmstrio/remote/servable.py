"""A model of another server as a servable: which address is called, whether once more, and what failures mean.

::

    call ── deadline ── hedge after a while, if configured ── attempt ── address in turn ── Endpoint
                                                                 └── nothing was sent? the next address, then a pause
"""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import trio

from ovmstrio.core.errors import DeadlineExceeded, InvalidRequest, NotFound, NotReady, PayloadTooLarge, ServerError
from ovmstrio.core.request import SEQUENCE_CONTROL, SEQUENCE_ID, ServableMetadata
from ovmstrio.core.tensor import RawTensor
from ovmstrio.core.tracing import current_span
from ovmstrio.models.sequences.requests import read_control
from ovmstrio.remote.endpoint import NotSent
from ovmstrio.serving.hosted_service import ResidentService
from ovmstrio.util.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ovmstrio.config.remote_entries import RemoteSpec
    from ovmstrio.core.request import InferRequest, InferResponse
    from ovmstrio.remote.endpoint import RemoteDescription
    from ovmstrio.remote.targets import Target, Targets

__all__ = ["RemoteServable", "SequenceStep", "given_id", "hedged", "step_of"]

# ----------------------------------------------------------------------
# Calling once more what takes long, and taking the first answer
# ----------------------------------------------------------------------

_T = TypeVar("_T")


async def hedged(
    call: Callable[[], Awaitable[_T]], after_seconds: float, *, is_final: Callable[[ServerError], bool]
) -> _T:
    """Give the first answer of a call, or of the same one made again when none has come after so many seconds.

    A call that fails before that is not made again.

    Raises:
        ServerError: the first failure, if both have failed; one that is final ends both.

    Cancellation: at any checkpoint; both are cancelled, as is the slower one.
    """
    race = _Race(call, is_final)
    async with trio.open_nursery() as nursery:
        race.begin(nursery)
        with trio.move_on_after(after_seconds):
            await race.over.wait()
        if not race.over.is_set():
            race.begin(nursery)
            await race.over.wait()
        nursery.cancel_scope.cancel()
    if race.answers:
        return race.answers[0]
    raise race.failures[0]


class _Race(Generic[_T]):
    def __init__(self, call: Callable[[], Awaitable[_T]], is_final: Callable[[ServerError], bool]) -> None:
        self._call = call
        self._is_final = is_final
        self._running = 0
        self.answers: list[_T] = []
        self.failures: list[ServerError] = []
        self.over = trio.Event()

    def begin(self, nursery: trio.Nursery) -> None:
        """Make the call once more."""
        self._running += 1
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            self.answers.append(await self._call())
        except ServerError as error:
            self._running -= 1
            # What is final is what is told.
            self.failures.insert(0 if self._is_final(error) else len(self.failures), error)
            if self._running and not self._is_final(error):
                return
        self.over.set()


# ----------------------------------------------------------------------
# What a request says of its sequence, read only as far as its way to a server depends on it
# ----------------------------------------------------------------------

_START: Final = "sequence_start"


class SequenceStep(NamedTuple):
    """One request of a sequence; the id is 0 where the server is to choose it."""

    id: int | str
    starts: bool
    ends: bool


def step_of(request: InferRequest) -> SequenceStep | None:
    """Read what a request says of its sequence, None if it belongs to none.

    What is wrong with it is for the server to say that has the model.
    """
    named = SEQUENCE_ID in request.parameters or _START in request.parameters
    if not named and not any(given.name in {SEQUENCE_ID, SEQUENCE_CONTROL} for given in request.inputs):
        return None
    with suppress(ServerError):
        control, _ = read_control(request)
        return SequenceStep(control.id, control.start, control.end)
    return SequenceStep(0, starts=False, ends=False)


def given_id(response: InferResponse) -> int | str:
    """Find the id that a server has chosen for a sequence, 0 if it says none."""
    told = response.parameters.get(SEQUENCE_ID, 0)
    if isinstance(told, int | str) and told:
        return told
    for output in response.outputs:
        if output.name == SEQUENCE_ID:
            raw = output.data if isinstance(output, RawTensor) else output.array.tobytes()
            return int.from_bytes(raw, "little")
    return 0


# ----------------------------------------------------------------------
# A model of another server as a servable: which address is called, whether once more, and what failures mean
# ----------------------------------------------------------------------

_VERSION: Final = "1"
_LONGEST_PAUSE_SECONDS: Final = 5.0


class RemoteServable(ResidentService):
    """One model of another server.

    Args:
        spec: how it is called.
        description: what the other server says of it.
        targets: where it is.
    """

    def __init__(self, spec: RemoteSpec, description: RemoteDescription, targets: Targets) -> None:
        super().__init__()
        self._spec = spec
        self._targets = targets
        self.metadata = ServableMetadata(
            spec.name, description.platform or "remote", description.inputs, description.outputs
        )

    @property
    def obstacle(self) -> str:
        """Why no address can be called, empty if one can."""
        told = self._targets.obstacle(trio.current_time())
        return f'remote model "{self._spec.name}": {told}' if told else ""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Have the other server answer, within the request's deadline and the configured time.

        Raises:
            NotReady: no address can be called, or the connection broke under the call.
            DeadlineExceeded: the answer did not come in time.
            PayloadTooLarge: the answer is larger than it may be.
            ServerError: what the other server answered, by its class and text, and the address.

        Ownership: the request's buffers until it returns.
        Cancellation: at any checkpoint; the other server is told, and drops the call.
        """
        now = trio.current_time()
        deadline = min(request.deadline, now + self._spec.timeout_seconds)
        step = step_of(request)
        try:
            if step is not None and step.id:
                response = await self._infer_step(request, step, deadline)
            elif step is None and self._spec.hedge_after_ms:
                tried: set[Target] = set()
                call = partial(self._attempt, request, deadline, tried=tried)
                response = await hedged(call, self._spec.hedge_after_ms / 1000, is_final=_is_final)
            else:
                response = await self._attempt(request, deadline, step)
        except NotSent as error:
            raise NotReady(error.message) from error
        if response.nbytes > request.most_bytes:
            raise PayloadTooLarge.of_outputs(response.nbytes, request.most_bytes)
        response.model_name, response.model_version, response.id = self._spec.name, _VERSION, request.id
        return response

    # Attempts

    async def _infer_step(self, request: InferRequest, step: SequenceStep, deadline: float) -> InferResponse:
        """Call the address that has the sequence; nobody else knows it."""
        target = self._targets.of_sequence(step, trio.current_time())
        response = await self._attempt(request, deadline, step, only=target)
        if step.ends:
            self._targets.forget(step.id)
        return response

    async def _attempt(
        self,
        request: InferRequest,
        deadline: float,
        step: SequenceStep | None = None,
        *,
        only: Target | None = None,
        tried: set[Target] | None = None,
    ) -> InferResponse:
        """Call one address after the other, as long as nothing of the call was sent; then all of them again.

        ``tried`` are those that another attempt at the same call has, which come last.
        """
        pauses = Backoff(self._spec.retry_pause_ms / 1000, _LONGEST_PAUSE_SECONDS)
        tried = set() if tried is None else tried
        failure: NotSent | None = None
        for attempt in range(self._spec.max_attempts):
            target = self._choose(tried, only)
            if target is None and tried:
                if attempt:
                    await self._pause(pauses.seconds_after(), deadline)
                tried.clear()
                target = self._choose(tried, only)
            if target is None:
                break
            tried.add(target)
            try:
                response = await self._call(target, request, deadline)
            except NotSent as error:
                failure = error
                continue
            if step is not None and step.starts and (chosen := given_id(response)):
                self._targets.place(chosen, target)
            return response
        if failure is not None:
            raise failure
        reason = self._targets.obstacle(trio.current_time()) or "another call tries whether it answers again"
        raise NotReady(f'remote model "{self._spec.name}" is not called: {reason}')

    def _choose(self, tried: set[Target], only: Target | None) -> Target | None:
        now = trio.current_time()
        if only is None:
            return self._targets.choose(now, tried)
        return only if only not in tried and only.breaker.allows(now) else None

    async def _pause(self, seconds: float, deadline: float) -> None:
        """Wait for half to all of a pause, so that not all callers come again at once."""
        seconds *= random.uniform(0.5, 1)  # noqa: S311 - nothing is to be kept secret
        await trio.sleep_until(min(trio.current_time() + seconds, deadline))

    async def _call(self, target: Target, request: InferRequest, deadline: float) -> InferResponse:
        """Call an address once, and note how it did."""
        begun = trio.current_time()
        if begun >= deadline:
            raise self._too_late(target)
        target.breaker.begin()
        try:
            with trio.move_on_at(deadline):
                response = await self._ask(target, request, deadline - begun)
                target.breaker.succeed()
                return response
            error: ServerError = self._too_late(target)
        except ServerError as raised:
            error = raised
        except BaseException:
            target.breaker.abandon()
            raise
        self._note(target, error, is_in_hurry=request.deadline <= deadline)
        raise error

    async def _ask(self, target: Target, request: InferRequest, seconds: float) -> InferResponse:
        """Have an address answer, as a part of the call that the other server is told of."""
        span = current_span.get()
        if span is None:
            return await target.endpoint.infer(request, seconds)
        told = {"server.address": target.endpoint.address, "ovmstrio.remote.name": self._spec.remote_name}
        with span.part(f"call {self._spec.remote_name}", told, "client"):
            return await target.endpoint.infer(request, seconds)

    def _note(self, target: Target, error: ServerError, *, is_in_hurry: bool) -> None:
        is_late = isinstance(error, DeadlineExceeded)
        if is_late and is_in_hurry:
            # The caller's own deadline says nothing of the address.
            target.breaker.abandon()
        elif is_late or isinstance(error, NotReady):
            target.breaker.fail(trio.current_time())
            target.suspect.set()
        else:
            target.breaker.succeed()
        if isinstance(error, NotSent):
            target.ailment = error.message

    def _too_late(self, target: Target) -> DeadlineExceeded:
        return DeadlineExceeded(f'{target.endpoint.address} did not answer for "{self._spec.name}" in time')


def _is_final(error: ServerError) -> bool:
    """Tell whether another address would have answered the same."""
    return isinstance(error, InvalidRequest | NotFound | DeadlineExceeded)
