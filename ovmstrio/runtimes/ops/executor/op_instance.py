"""A worker's own copy of an Op: its hooks, its model, and the threads that its plain hooks run in."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.executor.loop_calls import LoopCalls
from ovmstrio.runtimes.ops.hooks import Hook
from ovmstrio.runtimes.ops.op import Op
from ovmstrio.runtimes.ops.predictor.protocol import MakePredictor
from ovmstrio.runtimes.ops.settings import OpSettings
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_here, is_async

__all__ = ["OpInstance", "hooks_of", "init_failed", "start_instance"]

_MOST_ATTEMPTS: Final = 64
"""How many attempts of one batch may go on though they are late."""


class OpInstance:
    """One copy of an Op, with ``init_op`` done; made by :func:`start_instance`.

    Attributes:
        op: the copy.
        settings: what holds for the Op.
        preprocess: its hook of that name, as the others.
    """

    def __init__(self, op: Op, settings: OpSettings, calls: LoopCalls) -> None:
        self.op = op
        self.settings = settings
        self.preprocess, self.process, self.postprocess = hooks_of(op)
        self._calls = calls
        # A thread whose caller has gone still runs, and nothing else of its batch may have to wait for it; but where
        # very many attempts are made, the last of them do rather than that there is no end of threads.
        attempts = settings.batch_size * max(1, settings.retry)
        self._attempts = trio.CapacityLimiter(min(attempts, _MOST_ATTEMPTS) + 1)
        self._threads = trio.CapacityLimiter(2)

    @property
    def is_processing(self) -> bool:
        """Whether there is something to run between ``preprocess`` and ``postprocess``."""
        return self.op.client is not None or not self.process.is_default

    @property
    def is_busy(self) -> bool:
        """Whether a hook still runs."""
        return bool(self._threads.borrowed_tokens or self._attempts.borrowed_tokens or self._calls.running)

    async def idle(self) -> None:
        """Wait until no hook runs any more.

        Cancellation: at once.
        """
        await _until_free(self._threads)
        await _until_free(self._attempts)
        await self._calls.idle()

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run code of the Op that may block, and that nobody else waits for.

        Raises:
            UserCodeRaisedError: it raised.

        Cancellation: at once; the thread goes on, and the instance is busy until it has ended.
        """
        return await _in_thread(self._threads, function, args)

    async def on_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run code of the Op on the loop.

        Raises:
            UserCodeRaisedError: it raised.
            OpFailure: 3001, the pipeline has ended before it did.

        Cancellation: at once; the code is cancelled, and the instance is busy until it has ended.
        """
        return await self._calls.call(function, *args)

    async def attempt(self, feed: Mapping[str, Any], data_id: int) -> Any:
        """Make one attempt of ``process``, or of the model if that is not overridden.

        Raises:
            UserCodeRaisedError: it raised.
            OpFailure: as :meth:`on_loop`.

        Ownership: the feed until it has ended, which may be after this has been cancelled.

        Cancellation: at once; what goes on keeps the instance busy.
        """
        if self.process.is_default:
            return await self.on_loop(self.op.infer, feed)
        # An attempt that goes on may change its feed, which is not what the next one begins with.
        call = partial(self.process, [dict(feed)], data_id=data_id, log_id=data_id)
        if self.process.is_async:
            return await self.on_loop(call)
        return await _in_thread(self._attempts, call, ())

    async def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call another method of the Op where it belongs.

        Raises:
            UserCodeRaisedError: it raised.
            OpFailure: as :meth:`on_loop`.

        Cancellation: as :meth:`on_loop` and :meth:`in_thread`.
        """
        if is_async(method):
            return await self.on_loop(method, *args)
        return await self.in_thread(method, *args)

    def close(self) -> None:
        """Let go of the model."""
        if self.op.client is not None:
            self.op.client.close()


def hooks_of(op: Op) -> tuple[Hook, Hook, Hook]:
    """Give an Op's ``preprocess``, ``process`` and ``postprocess``.

    Raises:
        ConfigError: one of them cannot be called.
    """
    return (
        Hook(op.name, op.preprocess, 1, Op.preprocess),
        Hook(op.name, op.process, 1, Op.process),
        Hook(op.name, op.postprocess, 2, Op.postprocess),
    )


async def _in_thread(limiter: trio.CapacityLimiter, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = await trio.to_thread.run_sync(call_here, function, args, abandon_on_cancel=True, limiter=limiter)
    if isinstance(result, UserCodeRaisedError):
        raise result
    return result


async def _until_free(limiter: trio.CapacityLimiter) -> None:
    tokens = [object() for _ in range(int(limiter.total_tokens))]
    try:
        for token in tokens:
            await limiter.acquire_on_behalf_of(token)
    finally:
        for token in tokens:
            if token in limiter.statistics().borrowers:
                limiter.release_on_behalf_of(token)


async def start_instance(
    template: Op, settings: OpSettings, index: int, make_predictor: MakePredictor | None, calls: LoopCalls
) -> OpInstance:
    """Make a worker's copy of an Op, with its model, and run its ``init_op``.

    Args:
        template: the Op that services have made.
        settings: what holds for it.
        index: the worker's number.
        make_predictor: makes what runs its model.
        calls: runs its async hooks, and those of no other copy.

    Raises:
        ConfigError: its hooks cannot be called, its model cannot be loaded, or ``init_op`` raised, whose traceback the
            message has.

    Ownership: the caller must close the instance.

    Cancellation: while the model is loaded and while ``init_op`` waits; a thread in which it runs goes on.
    """
    op = copy.copy(template)
    op.concurrency_idx = index
    op.client_type = settings.client_type
    op._fetch_names = settings.fetch_list  # noqa: SLF001 - an attribute that services read
    instance = OpInstance(op, settings, calls)
    if settings.has_model and make_predictor is not None:
        op.client = await make_predictor(settings, index)
        op.with_serving = True
    try:
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
        raise init_failed(op, raised) from raised.error


def init_failed(op: Op, raised: UserCodeRaisedError) -> ConfigError:
    """Give the error that ends the start because of an ``init_op``, with its traceback."""
    text = "".join(traceback.format_exception(raised.error))
    message = f"init_op of Op {op.name} raised {type(raised.error).__name__}: {raised}\n{text}"
    return ConfigError([Problem(message)])
