"""Calls of services that make text, vectors or scores: the same lease, limits and event as all other calls."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import trio

from ovmstrio.core.errors import DeadlineExceeded, NotSupported
from ovmstrio.runtimes.kind import Takes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ovmstrio.core.events import Door
    from ovmstrio.core.generation import Generation, GenerationRequest, GenerativeService, Task, TextGenerator
    from ovmstrio.dataplane.observed_call import ObservedCall
    from ovmstrio.dataplane.plane import DataPlane

__all__ = ["call_generative", "open_generation"]


async def call_generative(
    plane: DataPlane,
    name: str,
    task: Task | None,
    door: Door,
    method: str,
    *,
    request_id: str = "",
    received: int = 0,
    is_stream: bool = False,
) -> ObservedCall:
    """Lease a service that does a task; the call ends with the ``with`` block of what is given.

    Args:
        plane: has it.
        name: of the service.
        task: what it must do; None where the caller looks for itself.
        door: which the call has come by.
        method: as the door's API calls it.
        request_id: that the caller gave.
        received: bytes of the call's body.
        is_stream: whether it is answered bit by bit.

    Raises:
        NotSupported: the service does something else.
        ServerError: as ``DataPlane.call``.

    Ownership and Cancellation: as ``DataPlane.call``.
    """
    call = await plane.call(name, door, method, request_id=request_id, received=received, is_stream=is_stream)
    if Takes.GENERATION in call.takes:
        does = cast("GenerativeService", call.service).tasks
        if task is None or task in does:
            return call
        said = f"does {' and '.join(sorted(each.value for each in does)) or 'none of it as it is configured'}"
    else:
        said = f"is a {call.event.kind} that takes {' and '.join(sorted(each.value for each in call.takes))}"
    wanted = "any of this" if task is None else task.value
    with call:
        raise NotSupported(f'the service "{name[:80]}" does no {wanted}; it {said}')


@asynccontextmanager
async def open_generation(call: ObservedCall, asked: GenerationRequest) -> AsyncIterator[Generation]:
    """Have the service of a call, which makes text, answer a request until its deadline.

    Raises:
        DeadlineExceeded: on leaving, when the deadline has passed, waiting or generating.
        ServerError: as ``TextGenerator.generate``.

    Ownership: the request, until the block is left; leaving it before the end cancels it.
    Cancellation: anywhere.
    """
    service = cast("TextGenerator", call.service)
    with trio.CancelScope(deadline=asked.deadline) as scope:
        async with service.generate(asked) as generation:
            yield generation
    if scope.cancelled_caught:
        raise DeadlineExceeded("the answer was not ready in the time that the request allows")
