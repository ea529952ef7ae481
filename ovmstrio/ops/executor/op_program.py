"""Main program of an Op worker process.

The first request names the Op and the worker; each later request is a batch, one at a time.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.isolation.trace_propagation import flush_spans, propagated_span
from ovmstrio.isolation.worker_program import WorkRequest, WorkRequests, exit_now, run_program
from ovmstrio.ops.config_file import resolve_op_settings
from ovmstrio.ops.executor.pipeline_source import (
    RECOVER,
    BatchReply,
    PipelineSource,
    decode_batch,
    encode_reply,
    ensure_sendable,
)
from ovmstrio.ops.executor.workers import GRACE_SECONDS, InstanceWorker
from ovmstrio.ops.observing.log_files import current_ids
from ovmstrio.telemetry.logs import forward_logs
from ovmstrio.util.stdio import install_line_buffering
from ovmstrio.util.truncation import format_error


async def _serve(first: WorkRequest, requests: WorkRequests) -> None:
    forwarder = requests.log_forwarder()
    forwarder.addFilter(_add_ids)
    forward_logs(forwarder)
    async with trio.open_nursery() as nursery:
        await _serve_worker(first, requests, nursery)
        nursery.cancel_scope.cancel()


def _add_ids(record: logging.LogRecord) -> bool:
    if ids := current_ids():
        record.ids = ids
    return True


async def _serve_worker(first: WorkRequest, requests: WorkRequests, nursery: trio.Nursery) -> None:
    answer = BatchReply()
    try:
        worker = _worker(first.value, answer, nursery)
        await worker.start()
    except Exception as error:  # noqa: BLE001 - raised by the user's script
        await first.answer(error.message if isinstance(error, ConfigError) else format_error(error))
        return
    try:
        await first.answer("")
        await requests.handle_all(partial(_answer, worker, answer), grace_seconds=GRACE_SECONDS)
    finally:
        await worker.aclose()


def _worker(request: dict[str, Any], answer: BatchReply, nursery: trio.Nursery) -> InstanceWorker:
    sys.path[:] = request["path"]
    loaded = PipelineSource(request["loader"], request["argument"]).load()
    op = loaded.graph.ops[request["op"]]
    settings = resolve_op_settings(op, loaded.settings)

    def report_stage(*stage: Any) -> None:
        answer.stages.append(stage)

    return InstanceWorker(
        op, settings, request["index"], loaded.make_predictor, report_stage=report_stage, nursery=nursery
    )


async def _answer(worker: InstanceWorker, answer: BatchReply, request: WorkRequest) -> None:
    if request.value == RECOVER:
        if worker.needs_recovery:
            await worker.recover()
        await request.answer(RECOVER)
        return
    samples, trace = decode_batch(request.value)
    with propagated_span("hooks", trace) if trace else nullcontext() as fail:
        answer.results = await worker.run(samples)
        failures = [result.failure.info for result in answer.results if result.failure is not None]
        if fail is not None and failures:
            fail(failures[0])
    answer.needs_recovery = worker.needs_recovery
    try:
        await request.answer(encode_reply(answer))
    except TypeError:
        answer.results = [ensure_sendable(result) for result in answer.results]
        await request.answer(encode_reply(answer))
    # Free large arrays before the next batch.
    answer.results, answer.stages = [], []


def main() -> None:
    """Run the worker; the first argument is the descriptor of the server's socket."""
    install_line_buffering()
    run_program(_serve)
    flush_spans()
    exit_now()


if __name__ == "__main__":
    main()
