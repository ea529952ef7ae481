"""What a worker does with a batch: ``preprocess`` of each sample, ``process`` of all, ``postprocess`` of each."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

import structlog
import trio

from ovmstrio.core.tracing import Span as TracedSpan
from ovmstrio.core.tracing import current_span
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.channel import ReportStage, Result, Sample
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.op_instance import OpInstance
from ovmstrio.runtimes.ops.executor.processing import Feed, process_all
from ovmstrio.runtimes.ops.observing.figures import SAMPLES, working_on
from ovmstrio.runtimes.ops.observing.hooks import Span, Stage
from ovmstrio.runtimes.ops.tensors import holds_arrays
from ovmstrio.runtimes.ops.values import ChannelData, ChannelDataType, CustomExceptionCode
from ovmstrio.work.user_code.calls import UserCodeRaisedError

__all__ = ["channel_data", "run_batch", "tell_stages"]


log = structlog.get_logger(__name__)

_NAMES: Final[Mapping[Stage, str]] = {"prep": "preprocess", "midp": "process", "postp": "postprocess"}
"""What traces call the stages of hooks."""


def tell_stages(
    stages: Iterable[tuple[Stage, Sequence[int], Span]], report_stage: ReportStage, op: TracedSpan | None
) -> None:
    """Tell of the stages of a batch that has ended, and have traces show them as parts of the Op."""
    for stage, ids, span in stages:
        report_stage(stage, ids, span)
        if op is not None:
            op.add(_NAMES[stage], span[1] - span[0], ended_ago=time.perf_counter() - span[1])


def run_batch(
    instance: OpInstance, samples: Sequence[Sample], report_stage: ReportStage
) -> Coroutine[Any, Any, list[Result]]:  # fmt: skip
    """Work on samples with one instance.

    Ownership: the samples until it returns.

    Cancellation: where a hook or the model waits; at once if a hook is in a thread, which goes on.
    """
    batch = _Batch(instance, samples, report_stage)
    # A sample that is alone is worked on in the name of its request already.
    if len(samples) == 1 and SAMPLES.get() == ((samples[0].data_id, samples[0].log_id),):
        return batch.run()
    return batch.run_named()


def _ids(sample: Sample) -> tuple[int, int]:
    return sample.data_id, sample.log_id


class _Batch:
    """Samples in one worker; ``feeds`` are those of the samples that have not failed, by position."""

    def __init__(self, instance: OpInstance, samples: Sequence[Sample], report_stage: ReportStage) -> None:
        self.instance = instance
        self.samples = samples
        self.spans: list[tuple[Stage, Sequence[int], Span]] = []
        self.report_stage = report_stage
        self.feeds: dict[int, Feed] = {}
        self.results: dict[int, Result] = {}

    async def run_named(self) -> list[Result]:
        with working_on(*map(_ids, self.samples)):
            return await self.run()

    async def run(self) -> list[Result]:
        before, after = self.instance.preprocess, self.instance.postprocess
        if before.is_async or after.is_async or self.instance.is_processing:
            await self._stage("preprocess", range(len(self.samples)))
            await self._process()
            await self._stage("postprocess", list(self.feeds))
        elif before.is_default and after.is_default:
            self._pre_and_post()
            # Ops that wait for nothing must not keep others from the loop.
            await trio.lowlevel.checkpoint()
        else:
            # One way to a thread and back is a good part of what a small Op takes.
            await self.instance.in_thread(self._pre_and_post)
        if self.instance.op.get_jump_to_ops():
            await self._decide_jumps()
        tell_stages(self.spans, self.report_stage, current_span.get())
        return [*map(self.results.__getitem__, range(len(self.samples)))]

    def _pre_and_post(self) -> None:
        self._each("preprocess", range(len(self.samples)))
        self._each("postprocess", list(self.feeds))

    async def _stage(self, name: str, positions: Sequence[int]) -> None:
        hook = getattr(self.instance, name)
        if hook.is_async:
            await self._each_on_loop(name, positions)
        elif hook.is_default:
            self._each(name, positions)
        else:
            await self.instance.in_thread(self._each, name, positions)

    def _each(self, name: str, positions: Sequence[int]) -> None:
        """Run one stage of every sample that is left, here."""
        begin = time.perf_counter()
        for position in positions:
            if len(self.samples) == 1:
                self._one(name, position)
            else:
                with working_on(_ids(self.samples[position])):
                    self._one(name, position)
        self._tell("prep" if name == "preprocess" else "postp", positions, begin)

    def _one(self, name: str, position: int) -> None:
        try:
            returned = self._hook(name, position)
        except BaseException as error:  # noqa: BLE001 - the border of user code
            self._fail_hook(position, error, name)
        else:
            self._take(name, position, returned)

    async def _each_on_loop(self, name: str, positions: Sequence[int]) -> None:
        begin = time.perf_counter()
        for position in positions:
            with working_on(_ids(self.samples[position])):
                try:
                    returned = await self.instance.on_loop(self._hook, name, position)
                except UserCodeRaisedError as raised:
                    self._fail_hook(position, raised.error, name)
                else:
                    self._take(name, position, returned)
        self._tell("prep" if name == "preprocess" else "postp", positions, begin)

    def _hook(self, name: str, position: int) -> Any:
        sample = self.samples[position]
        data_id, log_id = sample.data_id, sample.log_id
        if name == "preprocess":
            return self.instance.preprocess.call(sample.inputs, data_id, log_id)
        return self.instance.postprocess.call(sample.inputs, self.feeds[position].data, data_id, log_id)

    def _take(self, name: str, position: int, returned: Any) -> None:
        log_id = self.samples[position].log_id
        try:
            if name == "preprocess":
                self.feeds[position] = _feed(self.instance.op.name, returned)
            else:
                self.results[position] = Result(_output(self.instance.op.name, returned))
        except OpFailure as failure:
            self._fail(position, failure)
        except (TypeError, ValueError) as error:
            self._fail(position, failures.in_hook(error, log_id, name))

    def _fail_hook(self, position: int, error: BaseException, name: str) -> None:
        sample = self.samples[position]
        log.error(
            "hook raised",
            op=self.instance.op.name,
            hook=name,
            data_id=sample.data_id,
            exc_info=failures.cause_of(error),
        )
        self._fail(position, failures.in_hook(error, sample.log_id, name))

    def _fail(self, position: int, failure: OpFailure) -> None:
        self.feeds.pop(position, None)
        self.results[position] = Result(failure=failure)

    def _tell(self, stage: Stage, positions: Sequence[int], begin: float) -> None:
        samples = self.samples
        # Most batches are of one sample.
        ids = [samples[0].data_id] if len(positions) == len(samples) == 1 else [samples[at].data_id for at in positions]
        self.spans.append((stage, ids, (begin, time.perf_counter())))

    async def _process(self) -> None:
        wanted = {position: feed for position, feed in self.feeds.items() if not feed.is_skipped}
        if not wanted or not self.instance.is_processing:
            return
        begin = time.perf_counter()
        samples = {position: self.samples[position] for position in wanted}
        for position, outcome in (await process_all(self.instance, samples, wanted)).items():
            if isinstance(outcome, OpFailure):
                self._fail(position, outcome)
            else:
                self.feeds[position] = Feed(outcome)
        self._tell("midp", list(wanted), begin)

    async def _decide_jumps(self) -> None:
        for position, result in list(self.results.items()):
            if result.output is None:
                continue
            sample = self.samples[position]
            batch = {sample.data_id: channel_data(sample.data_id, sample.log_id, result.output)}
            try:
                jumps = bool(await self._asked(batch))
            except UserCodeRaisedError as raised:
                self._fail_hook(position, raised.error, "check_jumping")
            else:
                self.results[position] = Result(result.output, jumps=jumps)

    async def _asked(self, batch: Mapping[int, ChannelData]) -> Any:
        return await self.instance.ask(self.instance.op.check_jumping, batch)


def _feed(op: str, returned: Any) -> Feed:
    """Give what ``preprocess`` returned as a feed.

    Raises:
        OpFailure: an error code of the product, or a value of a wrong type.
        ValueError: there are not as many values as there should be.
    """
    data, is_skipped, code, info = returned if isinstance(returned, tuple) else (returned, False, None, "")
    if code is not None:
        raise failures.of_product(code, info)
    if not isinstance(data, dict | list):
        text = f"[{op}] preprocess should return a dict, a list of dicts or 4 values, got {type(data).__name__}"
        raise OpFailure(CustomExceptionCode.TYPE_ERROR.value, text)
    return Feed(data, is_skipped=bool(is_skipped))


def _output(op: str, returned: Any) -> dict[str, Any]:
    """Give what ``postprocess`` returned as an output.

    Raises:
        OpFailure: an error code of the product, or no dict.
        ValueError: it is not what it may return.
    """
    output, code, info = returned if isinstance(returned, tuple) else (returned, None, "")
    if code is not None:
        raise failures.of_product(code, info)
    if not isinstance(output, dict):
        text = f"[{op}] postprocess should return dict, got {type(output).__name__}"
        raise OpFailure(CustomExceptionCode.TYPE_ERROR.value, text)
    return dict(output)


def channel_data(data_id: int, log_id: int, output: Mapping[str, Any]) -> ChannelData:
    """Give an output as hooks get it."""
    if holds_arrays(output):
        kind = ChannelDataType.CHANNEL_NPDATA.value
        return ChannelData(kind, npdata=output, id=data_id, log_id=log_id)
    return ChannelData(dictdata=output, id=data_id, log_id=log_id)
