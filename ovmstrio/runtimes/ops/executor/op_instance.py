"""A worker's own copy of an Op: its hooks, its model, and the threads that its plain hooks run in."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.hooks import Hook
from ovmstrio.runtimes.ops.op import Op
from ovmstrio.runtimes.ops.predictor.protocol import MakePredictor
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import UserCodeRaisedError, call_in_thread, is_async
from ovmstrio.work.user_code.loop_calls import LoopCalls

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

    def __init__(self, op: Op, settings: OpSettings, nursery: trio.Nursery) -> None:
        self.op = op
        self.settings = settings
        self.preprocess, self.process, self.postprocess = hooks_of(op)
        self._calls = LoopCalls(nursery, failures.closed)
        # A thread whose caller has gone still runs, and nothing else of its batch may have to wait for it; but where
        # very many attempts are made, the last of them do rather than that there is no end of threads.
        attempts = settings.batch_size * max(1, settings.retry)
        self._attempts = WorkerThreads(min(attempts, _MOST_ATTEMPTS) + 1, is_strict=True)
        self._threads = WorkerThreads(2, is_strict=True)
        self._places = self._threads, self._attempts, self._calls

    @property
    def is_processing(self) -> bool:
        """Whether there is something to run between ``preprocess`` and ``postprocess``."""
        return self.op.client is not None or not self.process.is_default

    @property
    def is_busy(self) -> bool:
        """Whether a hook still runs."""
        return any(place.is_busy for place in self._places)

    async def idle(self) -> None:
        """Wait until no hook runs any more.

        Cancellation: at once.
        """
        for place in self._places:
            await place.idle()

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run code of the Op that may block, and that nobody else waits for.

        Raises:
            UserCodeRaisedError: it raised.

        Cancellation: at once; the thread goes on, and the instance is busy until it has ended.
        """
        return await call_in_thread(self._threads, function, *args)

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
        return await call_in_thread(self._attempts, call)

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

    async def start(self, nursery: trio.Nursery) -> None:
        """Have threads, which end with :meth:`close` or the nursery; those that are busy then are left to themselves.

        Cancellation: at once.
        """
        for threads in (self._threads, self._attempts):
            await nursery.start(partial(threads.run, is_shielded=False))

    def close(self) -> None:
        """Let go of the model and the threads."""
        self._threads.close()
        self._attempts.close()
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


async def start_instance(
    template: Op, settings: OpSettings, index: int, make_predictor: MakePredictor | None, nursery: trio.Nursery
) -> OpInstance:
    """Make a worker's copy of an Op, with its model, and run its ``init_op``.

    Args:
        template: the Op that services have made.
        settings: what holds for it.
        index: the worker's number.
        make_predictor: makes what runs its model.
        nursery: hosts its hooks.

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
    instance = OpInstance(op, settings, nursery)
    try:
        await instance.start(nursery)
        if settings.has_model and make_predictor is not None:
            op.client = await make_predictor(settings, index)
            op.with_serving = True
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
