"""Program of a process that measures the calls of models for ``--workers auto``.

The request has server options and model names.  The response has seconds on the event loop and in other threads for
each
model that runs on inputs of ones, or an error message.  User code is not run.
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
from ovmstrio.inference.blob_cache import default_cache_folder, open_blob_cache
from ovmstrio.inference.crash_probe import open_crash_probe, verdicts_folder
from ovmstrio.inference.tensors import placeholder
from ovmstrio.isolation.exit_status import exit_with_parent
from ovmstrio.isolation.worker_program import exit_now, run_program
from ovmstrio.server.command_line import cache_directory
from ovmstrio.server.plan import read_plan
from ovmstrio.server.settings import ServerSettings
from ovmstrio.server.start_failures import error_message, flatten_errors
from ovmstrio.serving.kind import LoadContext
from ovmstrio.serving.registry import Registry
from ovmstrio.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from ovmstrio.core.service import Servable
    from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests

_FIRST_CALLS: Final = 5
_FIRST_SECONDS: Final = 1.0
_CALLS: Final = 100
_SECONDS: Final = 0.2
"""Maximum time for the calls of one model."""


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    del requests
    try:
        answer = [await _measured(first), ""]
    except Exception as error:  # noqa: BLE001 - top level of the process
        answer = [{}, "; ".join(error_message(each) or repr(each) for each in flatten_errors(error))]
    await first.answer(answer)


async def _measured(first: WorkRequest) -> dict[str, list[float]]:
    settings = ServerSettings.model_validate(first.value["options"])
    plan = await read_plan(settings.model_copy(update={"workers": 1}))
    models = [spec for spec in plan.spec.services if spec.name in first.value["names"]]
    registry = Registry(plan.kinds, partial(LoadContext), poll_seconds=0)
    measured: dict[str, list[float]] = {}
    kept_gb = 0.0 if cache_directory(settings) is not None else settings.compiled_gb
    with open_blob_cache(default_cache_folder(), int(kept_gb * 10**9)) as blobs:
        async with trio.open_nursery() as nursery:
            with open_crash_probe(nursery, settings.trial_load, verdicts_folder(settings.cache_dir)) as probe:
                await nursery.start(registry.run)
            registry.context.share(probe, blobs)
            await registry.apply(models)
            for spec in models:
                # A model that cannot run on ones is not measured.
                with suppress(Exception):
                    measured[spec.name] = await _measure(registry.peek(spec.name))
            nursery.cancel_scope.cancel()
    return measured


async def _measure(servable: Servable) -> list[float]:
    """Return the mean CPU seconds per call on the event loop and in other threads.

    Slow first calls are ignored, unless a single call takes long.

    Raises:
        Exception: the model cannot be called.
    """
    metadata = servable.metadata
    if metadata.has_sequences or any(spec.datatype is BYTES for spec in metadata.inputs):
        raise ValueError("the model does not run on inputs of ones")
    ends = time.perf_counter() + _FIRST_SECONDS
    for _ in range(_FIRST_CALLS):
        took = await _call(servable)
        if time.perf_counter() > ends:
            return took
    on_loop = in_threads = 0.0
    ends, calls = time.perf_counter() + _SECONDS, 0
    while calls < _CALLS and time.perf_counter() < ends:
        loop, other = await _call(servable)
        on_loop, in_threads, calls = on_loop + loop, in_threads + other, calls + 1
    return [on_loop / calls, in_threads / calls]


async def _call(servable: Servable) -> list[float]:
    request = _request(servable)
    loop, process = time.thread_time(), time.process_time()
    await servable.infer(request)
    loop, process = time.thread_time() - loop, time.process_time() - process
    return [loop, max(0.0, process - loop)]


def _request(servable: Servable) -> InferRequest:
    arrays = [(spec, placeholder(spec)) for spec in servable.metadata.inputs]
    return InferRequest(
        model_name=servable.metadata.name,
        inputs=[InferInput(spec.name, spec.datatype.name, array.shape) for spec, array in arrays],
        raw_inputs=[array.tobytes() for _, array in arrays],
    )


def main() -> None:
    """Measure for the process with the socket descriptor ``argv[1]`` and the parent-watch descriptor ``argv[2]``."""
    exit_with_parent(int(sys.argv[2]))
    configure_logs(level="ERROR")
    # Errors of models are reported by the process that serves them.
    logging.disable(logging.ERROR)
    run_program(_serve)
    exit_now()


if __name__ == "__main__":
    main()
