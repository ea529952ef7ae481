"""The program of a process that loads models for a moment, and tells what a call of each of them takes.

Its first request has the options of the server and the names of the models.  The answer has the seconds of the event
loop and those of other threads for each model that could be called on ones, and why there are none, if nothing could be
measured.  Code of users is not run.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from ovmstrio.core.request import InferInput, InferRequest
from ovmstrio.core.tensor import BYTES
from ovmstrio.inference.blob_cache import compiled_folder, keeping_compiled_files
from ovmstrio.inference.crash_probe import trials_folder, trying_models
from ovmstrio.inference.tensors import placeholder
from ovmstrio.isolation.process_exit import watch_lifeline
from ovmstrio.isolation.worker_program import leave, run_program
from ovmstrio.server.command_line import cache_directory
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.start_failures import leaves, reason_of
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.registry import Registry
from ovmstrio.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from ovmstrio.core.service import Servable
    from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests

__all__ = ["main"]

_FIRST_CALLS: Final = 5
_FIRST_SECONDS: Final = 1.0
_CALLS: Final = 100
_SECONDS: Final = 0.2
"""How long one model is called at most."""


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    """Measure, and be done.

    Cancellation: at once; models are unloaded.
    """
    del requests
    try:
        answer = [await _measured(first), ""]
    except Exception as error:  # noqa: BLE001 - the border of the process
        answer = [{}, "; ".join(reason_of(each) or repr(each) for each in leaves(error))]
    await first.answer(answer)


async def _measured(first: WorkRequest) -> dict[str, list[float]]:
    """Load the models that are asked for, and measure those that can be measured.

    Raises:
        Exception: what is configured cannot be read any more.

    Cancellation: at once; models are unloaded.
    """
    settings = ServerSettings.model_validate(first.value["options"])
    plan = await read_plan(settings.model_copy(update={"workers": 1}))
    models = [spec for spec in plan.spec.services if spec.name in first.value["names"]]
    registry = Registry(plan.kinds, partial(LoadContext), poll_seconds=0)
    measured: dict[str, list[float]] = {}
    kept_gb = 0.0 if cache_directory(settings) is not None else settings.compiled_gb
    with keeping_compiled_files(compiled_folder(), int(kept_gb * 10**9)):
        async with trio.open_nursery() as nursery:
            with trying_models(nursery, settings.trial_load, trials_folder(settings.cache_dir)):
                await nursery.start(registry.run)
            await registry.apply(models)
            for spec in models:
                # Whatever keeps one from being called on ones keeps it from being measured, and nothing else.
                with suppress(Exception):
                    measured[spec.name] = await _measure(registry.peek(spec.name))
            nursery.cancel_scope.cancel()
    return measured


async def _measure(servable: Servable) -> list[float]:
    """Call a model on ones for a while, and give the processor time of the loop, and of others, that a call took.

    The first calls, which take longer, do not count; but of a model that takes its time one of them is all there is.

    Raises:
        Exception: it cannot be called so.
    """
    metadata = servable.metadata
    if metadata.has_sequences or any(spec.datatype is BYTES for spec in metadata.inputs):
        raise ValueError("a call would be more than ones")
    ends = time.perf_counter() + _FIRST_SECONDS
    for _ in range(_FIRST_CALLS):
        took = await _call(servable)
        if time.perf_counter() > ends:
            return took
    on_loop = beside = 0.0
    ends, calls = time.perf_counter() + _SECONDS, 0
    while calls < _CALLS and time.perf_counter() < ends:
        loop, other = await _call(servable)
        on_loop, beside, calls = on_loop + loop, beside + other, calls + 1
    return [on_loop / calls, beside / calls]


async def _call(servable: Servable) -> list[float]:
    """Call a model once; gives what :func:`_measure` does.

    Raises:
        Exception: as there.
    """
    request = _request(servable)
    loop, whole = time.thread_time(), time.process_time()
    await servable.infer(request)
    loop, whole = time.thread_time() - loop, time.process_time() - whole
    return [loop, max(0.0, whole - loop)]


def _request(servable: Servable) -> InferRequest:
    arrays = [(spec, placeholder(spec)) for spec in servable.metadata.inputs]
    return InferRequest(
        model_name=servable.metadata.name,
        inputs=[InferInput(spec.name, spec.datatype.name, array.shape) for spec, array in arrays],
        raw_inputs=[array.tobytes() for _, array in arrays],
    )


def main() -> None:
    """Measure for the process whose socket's descriptor is the first argument, and its lifeline's the second."""
    watch_lifeline(int(sys.argv[2]))
    configure_logs(level="ERROR")
    # What is wrong with a model is told by the process that serves it.
    logging.disable(logging.ERROR)
    run_program(_serve)
    leave()


if __name__ == "__main__":
    main()
