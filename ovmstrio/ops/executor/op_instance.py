"""Copy of an Op for one worker, and the stages of a batch: hooks, model and the threads of synchronous hooks."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, Final

import numpy as np
import structlog
import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.core.tracing import Span as TracedSpan
from ovmstrio.core.tracing import current_span
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import AbandonableLoopCalls, UserCodeRaisedError, call_in_thread, is_async
from ovmstrio.ops.executor import failures
from ovmstrio.ops.executor.channel import Result, Sample, StageCallback
from ovmstrio.ops.executor.failures import OpFailure
from ovmstrio.ops.messages import (
    LOD_SUFFIX,
    ChannelData,
    ChannelDataType,
    CustomExceptionCode,
    code_number,
    holds_arrays,
)
from ovmstrio.ops.observing.hooks import Span, Stage
from ovmstrio.ops.observing.log_files import SAMPLES, current_samples, log_fields_of
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.protocol import CreatePredictor, FeedTypeError, ModelClient, Predictor
from ovmstrio.ops.settings import OpSettings
from ovmstrio.util.truncation import format_error

# ----------------------------------------------------------------------
# Copy of an Op
# ----------------------------------------------------------------------

_IDS: Final = ("data_id", "log_id")
_ID_ALIASES: Final = {"logid": "log_id", "typical_logid": "data_id", "dataid": "data_id"}
_POSITIONAL: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Hook:
    """Hook of an Op, which may omit the data id and log id parameters or take them by name.

    ``call`` takes ``values`` arguments and both ids.  Raises ConfigError for an unsuitable signature.
    """

    __slots__ = ("_by_name", "_by_position", "_method", "call", "is_async", "is_default")

    def __init__(self, owner: str, method: Callable[..., Any], values: int, default: Callable[..., Any]) -> None:
        self._method = method
        self.is_async = is_async(method)
        self.is_default = getattr(method, "__func__", None) is default
        self._by_position, self._by_name = _id_parameters(owner, method, values, default)
        takes_both_ids = self._by_position == _IDS and not self._by_name
        self.call: Callable[..., Any] = method if takes_both_ids else self._call_adapted

    def _call_adapted(self, *given: Any) -> Any:
        values, numbers = given[: -len(_IDS)], dict(zip(_IDS, given[-len(_IDS) :], strict=True))
        by_name = {name: numbers[_ID_ALIASES.get(name, name)] for name in self._by_name}
        return self._method(*values, *[numbers[name] for name in self._by_position], **by_name)


def _id_parameters(
    owner: str, method: Callable[..., Any], values: int, default: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parameters = inspect.signature(method).parameters
    if any(one.kind is Parameter.VAR_POSITIONAL for one in parameters.values()):
        return _IDS, ()
    positional = [name for name, one in parameters.items() if one.kind in _POSITIONAL]
    given = _match_ids(positional[values:])
    required = [name for name in positional[values + len(given) :] if parameters[name].default is Parameter.empty]
    if len(positional) < values or required:
        raise _wrong_arity(owner, method, default)
    left = [name for name in _IDS if name not in given]
    return given, _by_name(parameters, left)


def _match_ids(names: list[str]) -> tuple[str, ...]:
    """Return the id for each name: the one that it names, otherwise the next one."""
    left, taken = list(_IDS), []
    for name in names[: len(_IDS)]:
        known = _ID_ALIASES.get(name, name)
        taken.append(left.pop(left.index(known) if known in left else 0))
    return tuple(taken)


def _by_name(parameters: Mapping[str, Parameter], left: list[str]) -> tuple[str, ...]:
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return tuple(left)
    only = [name for name, one in parameters.items() if one.kind is Parameter.KEYWORD_ONLY]
    return tuple(name for name in only if _ID_ALIASES.get(name, name) in left)


def _wrong_arity(owner: str, method: Callable[..., Any], default: Callable[..., Any]) -> ConfigError:
    name = default.__name__
    given, usual = (", ".join(inspect.signature(each).parameters) for each in (method, default))
    given = given if getattr(method, "__self__", None) is None else ", ".join(filter(None, ("self", given)))
    code = getattr(inspect.unwrap(method), "__code__", None)
    problem = Problem(
        f"{name} of Op {owner} cannot be called",
        file="" if code is None else code.co_filename,
        line=None if code is None else code.co_firstlineno,
        expected=f"{name}({usual}), ids optional",
        found=f"{name}({given})",
    )
    return ConfigError([problem])


_MAX_ATTEMPT_THREADS: Final = 64
"""Most threads for attempts of one batch."""

_MAX_ABANDONED: Final = 8
"""Most abandoned attempts in threads before the worker waits for them."""


class OpInstance:
    """Copy of an Op after ``init_op``; created by :func:`start_instance`."""

    def __init__(self, op: Op, settings: OpSettings, nursery: trio.Nursery) -> None:
        self.op = op
        self.settings = settings
        self.predictor: Predictor | None = None
        self.preprocess, self.process, self.postprocess = get_hooks(op)
        names = log_fields_of(op.name)
        self._calls = AbandonableLoopCalls(nursery, failures.closed_failure, names=names)
        # An abandoned thread still runs and must not delay the rest of its batch.  The bound on threads is stronger:
        # with very many attempts the last ones wait.
        attempts = settings.batch_size * max(1, settings.retry)
        self._attempts = WorkerThreads(
            min(attempts, _MAX_ATTEMPT_THREADS) + _MAX_ABANDONED, is_strict=True, log_fields=names
        )
        self._threads = WorkerThreads(2, is_strict=True, log_fields=names)
        self._executors = self._threads, self._attempts, self._calls

    @property
    def is_processing(self) -> bool:
        """True if the Op has a model or overrides ``process``."""
        return self.op.client is not None or not self.process.is_default

    @property
    def is_busy(self) -> bool:
        """True if a hook still runs."""
        return any(executor.is_busy for executor in self._executors)

    @property
    def needs_recovery(self) -> bool:
        """True if the next batch cannot start yet.

        Abandoned attempts of ``process`` have spare threads, so that only many of them block the instance.
        """
        return self._threads.is_busy or self._calls.is_busy or self._attempts.abandoned >= _MAX_ABANDONED

    async def idle(self) -> None:
        """Wait until no hook runs."""
        for executor in self._executors:
            await executor.idle()

    def in_thread(self, function: Callable[..., Any], *args: Any) -> Coroutine[Any, Any, Any]:
        """Run blocking code of the Op in a thread; raises UserCodeRaisedError.

        Cancellation: the thread continues, and the instance is busy until the thread ends.
        """
        return call_in_thread(self._threads, function, *args)

    async def on_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run code of the Op on the loop; raises UserCodeRaisedError, or OpFailure 3001 if the pipeline ends first.

        Cancellation: cancels the code; the instance is busy until the code ends.
        """
        return await self._calls.call(function, *args)

    async def attempt(self, feed: Mapping[str, Any], data_id: int) -> Any:
        """Run ``process`` once, or the model if ``process`` is not overridden; raises as :meth:`on_loop`.

        The feed may be in use after cancellation.
        """
        if self.process.is_default and isinstance(self.op.client, ModelClient):
            return await self.on_loop(self.op.infer, feed)
        # Copied, because an abandoned attempt may modify its feed during the next attempt.
        call = partial(self.process.call, [dict(feed)], data_id, data_id)
        if self.process.is_async:
            return await self.on_loop(call)
        return await call_in_thread(self._attempts, call)

    async def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call another method of the Op, on the loop or in a thread; raises as :meth:`on_loop`."""
        if is_async(method):
            return await self.on_loop(method, *args)
        return await self.in_thread(method, *args)

    async def start(self, nursery: trio.Nursery) -> None:
        """Start the threads; the end of the nursery abandons busy ones."""
        for threads in (self._threads, self._attempts):
            await nursery.start(partial(threads.run, is_shielded=False))

    def close(self) -> None:
        """Release the model and the threads."""
        self._threads.close()
        self._attempts.close()
        if self.predictor is not None:
            self.predictor.close()


def get_hooks(op: Op) -> tuple[Hook, Hook, Hook]:
    """Return the hooks ``preprocess``, ``process`` and ``postprocess`` of an Op; raises ConfigError."""
    return (
        Hook(op.name, op.preprocess, 1, Op.preprocess),
        Hook(op.name, op.process, 1, Op.process),
        Hook(op.name, op.postprocess, 2, Op.postprocess),
    )


async def start_instance(
    template: Op, settings: OpSettings, index: int, make_predictor: CreatePredictor | None, nursery: trio.Nursery
) -> OpInstance:
    """Copy an Op for a worker, load its model and run its ``init_op``; the caller must close the instance.

    Raises ConfigError for unsuitable hooks, a model that cannot be loaded, or an exception of ``init_op``.
    """
    op = copy.copy(template)
    op.concurrency_idx = index
    op.client_type = settings.client_type
    op._fetch_names = settings.fetch_list  # noqa: SLF001 - an attribute that services read
    instance = OpInstance(op, settings, nursery)
    try:
        await instance.start(nursery)
        if settings.has_model and make_predictor is not None:
            instance.predictor = await make_predictor(settings, index)
            if op.packs_tensors and hasattr(instance.predictor, "packs_tensors"):  # that of another pipeline
                instance.predictor.packs_tensors = True
            op.client = ModelClient(instance.predictor)
            op.with_serving = True
            op._fetch_names = settings.fetch_list or op.client.fetch_names_ or None  # noqa: SLF001 - as above
        await _init(instance)
    except BaseException:
        instance.close()
        raise
    return instance


async def _init(instance: OpInstance) -> None:
    op = instance.op
    try:
        if type(op).init_op is not Op.init_op:
            await instance.ask(op.init_op)
    except UserCodeRaisedError as raised:
        raise init_error(op, raised) from raised.error


def init_error(op: Op, raised: UserCodeRaisedError) -> ConfigError:
    """Return the error of an ``init_op`` that raised, with its traceback."""
    text = format_error(raised.error)
    message = f"init_op of Op {op.name} raised {type(raised.error).__name__}: {raised}\n{text}"
    return ConfigError([Problem(message)])


# ----------------------------------------------------------------------
# Stages of a batch
# ----------------------------------------------------------------------

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
    # A process of the service may change the feed before it runs the model, which checks it.
    if instance.predictor is not None and instance.process.is_default:
        for one in feeds:
            instance.predictor.check(one)


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
            if code is not None and (number := code_number(code)):
                raise failures.returned_failure(self._name, number, info)
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
        return ChannelData(kind, npdata=output, data_id=data_id, log_id=log_id)
    return ChannelData(dictdata=output, data_id=data_id, log_id=log_id)
