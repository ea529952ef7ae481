"""Batch processing in a worker: ``preprocess`` per sample, ``process`` per merged batch, ``postprocess`` per sample."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.tracing import Span as TracedSpan
from ovmstrio.core.tracing import current_span
from ovmstrio.isolation.user_code import UserCodeRaisedError
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import Result, Sample, StageCallback
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.executor.op_instance import OpInstance
from ovmstrio.ops.observing.hooks import Span, Stage
from ovmstrio.ops.observing.log_files import SAMPLES, current_samples
from ovmstrio.ops.predictor.protocol import FeedTypeError
from ovmstrio.ops.values import LOD_SUFFIX, ChannelData, ChannelDataType, CustomExceptionCode, holds_arrays

# Merging and processing

Row = Mapping[str, Any]


def merge_key(feed: Row) -> Hashable | None:
    """Return the merge key of a feed, or None: names, types and shapes except for the number of rows."""
    if not all(isinstance(name, str) for name in feed):
        return None
    rows = {name: _rows(value) for name, value in feed.items() if not name.endswith(LOD_SUFFIX)}
    if len(set(rows.values())) != 1 or None in rows.values() or len(rows) != len(feed):
        return None
    return frozenset((name, *_type_key(value)) for name, value in feed.items())


def _rows(value: Any) -> int | None:
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _type_key(value: Any) -> tuple[Any, ...]:
    return (value.dtype.str, value.shape[1:]) if isinstance(value, np.ndarray) else ("list",)


def row_count(feed: Row) -> int:
    """Return the number of rows of a mergeable feed."""
    return len(next(iter(feed.values())))


def merge(feeds: Sequence[Row]) -> dict[str, Any]:
    """Concatenate feeds with the same merge key."""
    return {name: _concatenate([feed[name] for feed in feeds]) for name in feeds[0]}


def _concatenate(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    return np.concatenate(values)


def split(outputs: Mapping[str, Any], rows: Sequence[int]) -> list[dict[str, Any]] | None:
    """Return the output rows of each sample, or None if an output has another number of rows than the feeds.

    An output with row offsets has one offset interval per row.
    """
    ends = np.cumsum(rows).tolist()
    starts = [0, *ends[:-1]]
    total = ends[-1]
    for name, value in outputs.items():
        offsets = outputs.get(name + LOD_SUFFIX)
        if name.endswith(LOD_SUFFIX) and name.removesuffix(LOD_SUFFIX) in outputs:
            continue
        if (len(offsets) - 1 if offsets is not None else _rows(value)) != total:
            return None
    return [_part(outputs, start, end) for start, end in zip(starts, ends, strict=True)]


def _part(outputs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for name, value in outputs.items():
        if name in part:
            continue
        offsets = outputs.get(name + LOD_SUFFIX)
        if offsets is None:
            part[name] = value[start:end]
        else:
            part[name] = value[int(offsets[start]) : int(offsets[end])]
            part[name + LOD_SUFFIX] = offsets[start : end + 1] - offsets[start]
    return part


_TUPLE_LENGTH = 3

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Feed:
    """Input of the model or of ``postprocess``: a dict, or a list of dicts."""

    data: Any
    is_skipped: bool = False


Outcome = dict[str, Any] | list[dict[str, Any]] | OpFailure


async def process_all(
    instance: OpInstance, samples: Mapping[int, Sample], feeds: Mapping[int, Feed]
) -> dict[int, Outcome]:
    """Run ``process`` for the samples and return their outcomes by position."""
    outcomes: dict[int, Outcome] = {}
    groups: dict[Hashable, list[int]] = {}
    for position, feed in feeds.items():
        try:
            _check(instance, feed.data)
            kind = merge_key(feed.data) if isinstance(feed.data, dict) else None
        except Exception as error:  # noqa: BLE001 - other samples of the batch continue
            outcomes[position] = failures.process_failure(instance.op.name, error, samples[position].log_id)
            continue
        groups.setdefault((kind, None if kind is not None else position), []).append(position)
    for positions in groups.values():
        run = _Run(instance, [samples[one] for one in positions])
        outcomes |= zip(positions, await run.outcomes([feeds[one].data for one in positions]), strict=True)
    return outcomes


def _check(instance: OpInstance, data: Any) -> None:
    feeds = data if isinstance(data, list) else [data]
    wrong = [type(one).__name__ for one in feeds if not isinstance(one, dict)]
    if wrong:
        raise FeedTypeError(f"preprocess should return a dict or a list of dicts, got {wrong[0]}")
    if instance.op.client is not None:
        for one in feeds:
            instance.op.client.check(one)


class _Run:
    def __init__(self, instance: OpInstance, samples: Sequence[Sample]) -> None:
        self._instance = instance
        self._samples = samples
        self._name = instance.op.name

    async def outcomes(self, feeds: Sequence[Any]) -> Sequence[Outcome]:
        """Return the outcome of each sample; if a merged run fails, run the samples one by one."""
        try:
            if len(feeds) == 1:
                return [await self._run_with_timeout(feeds[0])]
            parts = split(await self._run_with_timeout(merge(feeds)), [row_count(feed) for feed in feeds])
            if parts is not None:
                return parts
            log.warning("batch output rows do not match input rows", op=self._name)
        except OpFailure as failure:
            return [failure] * len(feeds)
        except Exception as error:
            log.warning("process failed", op=self._name, data_ids=self._sample_ids(), exc_info=failures.cause_of(error))
            if len(feeds) == 1:
                return [failures.process_failure(self._name, error, self._samples[0].log_id)]
        return await self._run_singly(feeds)

    async def _run_singly(self, feeds: Sequence[Any]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for sample, feed in zip(self._samples, feeds, strict=True):
            outcomes.extend(await _Run(self._instance, [sample]).outcomes([feed]))
        return outcomes

    def _sample_ids(self) -> list[int]:
        return [sample.data_id for sample in self._samples]

    async def _run_with_timeout(self, feed: Any) -> Any:
        limit = self._instance.settings.timeout_seconds
        if limit is None:
            return await self._attempt(feed)
        attempts = max(1, self._instance.settings.retry)
        for _ in range(attempts):
            with trio.move_on_after(limit):
                return await self._attempt(feed)
            log.warning("process timed out", op=self._name, data_ids=self._sample_ids(), seconds=limit)
        raise failures.timeout_failure(self._name, attempts, limit)

    async def _attempt(self, feed: Any) -> Any:
        if isinstance(feed, list):
            return [await self._process(one) for one in feed]
        return await self._process(feed)

    async def _process(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        returned = await self._instance.attempt(feed, self._samples[0].data_id)
        if isinstance(returned, tuple) and len(returned) == _TUPLE_LENGTH:
            returned, code, info = returned
            if code:
                raise failures.returned_failure(self._name, int(code), info)
        if not isinstance(returned, dict):
            text = f"process should return a dict, got {type(returned).__name__}"
            raise UserCodeRaisedError(TypeError(text))
        return dict(returned)


# Stages of a batch

_NAMES: Final[Mapping[Stage, str]] = {"prep": "preprocess", "midp": "process", "postp": "postprocess"}
"""Span names of the hook stages."""


def report_stages(
    stages: Iterable[tuple[Stage, Sequence[int], Span]], report_stage: StageCallback, op: TracedSpan | None
) -> None:
    """Report the stages of a finished batch and add them to the Op's span."""
    for stage, ids, span in stages:
        report_stage(stage, ids, span)
        if op is not None:
            op.add(_NAMES[stage], span[1] - span[0], ended_ago=time.perf_counter() - span[1])


def run_batch(
    instance: OpInstance, samples: Sequence[Sample], report_stage: StageCallback
) -> Coroutine[Any, Any, list[Result]]:  # fmt: skip
    """Return the coroutine that processes samples with one instance; a hook in a thread survives cancellation."""
    batch = _Batch(instance, samples, report_stage)
    # The context of a single sample's request names the sample already.
    if len(samples) == 1 and SAMPLES.get() == ((samples[0].data_id, samples[0].log_id),):
        return batch.run()
    return batch.run_named()


def _sample_ids(sample: Sample) -> tuple[int, int]:
    return sample.data_id, sample.log_id


class _Batch:
    def __init__(self, instance: OpInstance, samples: Sequence[Sample], report_stage: StageCallback) -> None:
        self.instance = instance
        self.samples = samples
        self.spans: list[tuple[Stage, Sequence[int], Span]] = []
        self.report_stage = report_stage
        self.feeds: dict[int, Feed] = {}
        self.results: dict[int, Result] = {}

    async def run_named(self) -> list[Result]:
        with current_samples(*map(_sample_ids, self.samples)):
            return await self.run()

    async def run(self) -> list[Result]:
        before, after = self.instance.preprocess, self.instance.postprocess
        if before.is_async or after.is_async or self.instance.is_processing:
            await self._stage("preprocess", range(len(self.samples)))
            await self._process()
            await self._stage("postprocess", list(self.feeds))
        elif before.is_default and after.is_default:
            self._pre_and_post()
            # Ops that never block must not starve the loop.
            await trio.lowlevel.checkpoint()
        else:
            # One thread hop for both hooks: a hop is much of a small Op's time.
            await self.instance.in_thread(self._pre_and_post)
        if self.instance.op.get_jump_to_ops():
            await self._decide_jumps()
        report_stages(self.spans, self.report_stage, current_span.get())
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
        begin = time.perf_counter()
        for position in positions:
            if len(self.samples) == 1:
                self._run_hook(name, position)
            else:
                with current_samples(_sample_ids(self.samples[position])):
                    self._run_hook(name, position)
        self._add_span("prep" if name == "preprocess" else "postp", positions, begin)

    def _run_hook(self, name: str, position: int) -> None:
        try:
            returned = self._call_hook(name, position)
        except BaseException as error:  # noqa: BLE001 - raised by user code
            self._fail_hook(position, error, name)
        else:
            self._store(name, position, returned)

    async def _each_on_loop(self, name: str, positions: Sequence[int]) -> None:
        begin = time.perf_counter()
        for position in positions:
            with current_samples(_sample_ids(self.samples[position])):
                try:
                    returned = await self.instance.on_loop(self._call_hook, name, position)
                except UserCodeRaisedError as raised:
                    self._fail_hook(position, raised.error, name)
                else:
                    self._store(name, position, returned)
        self._add_span("prep" if name == "preprocess" else "postp", positions, begin)

    def _call_hook(self, name: str, position: int) -> Any:
        sample = self.samples[position]
        data_id, log_id = sample.data_id, sample.log_id
        if name == "preprocess":
            return self.instance.preprocess.call(sample.inputs, data_id, log_id)
        return self.instance.postprocess.call(sample.inputs, self.feeds[position].data, data_id, log_id)

    def _store(self, name: str, position: int, returned: Any) -> None:
        log_id = self.samples[position].log_id
        try:
            if name == "preprocess":
                self.feeds[position] = _feed(self.instance.op.name, returned)
            else:
                self.results[position] = Result(_output(self.instance.op.name, returned))
        except OpFailure as failure:
            self._fail(position, failure)
        except (TypeError, ValueError) as error:
            self._fail(position, failures.hook_failure(error, log_id, name))

    def _fail_hook(self, position: int, error: BaseException, name: str) -> None:
        sample = self.samples[position]
        log.error(
            "hook raised",
            op=self.instance.op.name,
            hook=name,
            data_id=sample.data_id,
            exc_info=failures.cause_of(error),
        )
        self._fail(position, failures.hook_failure(error, sample.log_id, name))

    def _fail(self, position: int, failure: OpFailure) -> None:
        self.feeds.pop(position, None)
        self.results[position] = Result(failure=failure)

    def _add_span(self, stage: Stage, positions: Sequence[int], begin: float) -> None:
        samples = self.samples
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
        self._add_span("midp", list(wanted), begin)

    async def _decide_jumps(self) -> None:
        for position, result in list(self.results.items()):
            if result.output is None:
                continue
            sample = self.samples[position]
            batch = {sample.data_id: make_channel_data(sample.data_id, sample.log_id, result.output)}
            try:
                jumps = bool(await self.instance.ask(self.instance.op.check_jumping, batch))
            except UserCodeRaisedError as raised:
                self._fail_hook(position, raised.error, "check_jumping")
            else:
                self.results[position] = Result(result.output, jumps=jumps)


def _feed(op: str, returned: Any) -> Feed:
    data, is_skipped, code, info = returned if isinstance(returned, tuple) else (returned, False, None, "")
    if code is not None:
        raise failures.product_failure(code, info)
    if not isinstance(data, dict | list):
        text = f"[{op}] preprocess should return a dict, a list of dicts or 4 values, got {type(data).__name__}"
        raise OpFailure(CustomExceptionCode.TYPE_ERROR.value, text)
    return Feed(data, is_skipped=bool(is_skipped))


def _output(op: str, returned: Any) -> dict[str, Any]:
    output, code, info = returned if isinstance(returned, tuple) else (returned, None, "")
    if code is not None:
        raise failures.product_failure(code, info)
    if not isinstance(output, dict):
        text = f"[{op}] postprocess should return dict, got {type(output).__name__}"
        raise OpFailure(CustomExceptionCode.TYPE_ERROR.value, text)
    return dict(output)


def make_channel_data(data_id: int, log_id: int, output: Mapping[str, Any]) -> ChannelData:
    """Return an output in the form that hooks receive."""
    if holds_arrays(output):
        kind = ChannelDataType.CHANNEL_NPDATA.value
        return ChannelData(kind, npdata=output, id=data_id, log_id=log_id)
    return ChannelData(dictdata=output, id=data_id, log_id=log_id)
