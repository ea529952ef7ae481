"""A worker's own copy of an Op: its hooks, its model, and the threads that its plain hooks run in."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from inspect import Parameter
from typing import Any, Final

import trio

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.isolation.thread_pool import WorkerThreads
from ovmstrio.isolation.user_code import LoopCalls, UserCodeRaisedError, call_in_thread, is_async
from ovmstrio.ops.executor import failures
from ovmstrio.ops.observing.figures import names_of_code
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.protocol import MakePredictor
from ovmstrio.ops.settings import OpSettings
from ovmstrio.util.truncation import format_error

__all__ = ["Hook", "OpInstance", "hooks_of", "init_failed", "start_instance"]

_IDS: Final = ("data_id", "log_id")
_OTHER_NAMES: Final = {"logid": "log_id", "typical_logid": "data_id", "dataid": "data_id"}
_POSITIONAL: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Hook:
    """One hook of one Op, which may leave out the numbers of the sample, or take them by name.

    Args:
        owner: the Op's name, for messages.
        method: the hook of an instance.
        values: how many arguments come before the numbers.
        default: the hook that the Op would have if it did not override it.

    Attributes:
        call: calls it with its values, the data id and the log id, or gives its coroutine.
        is_async: whether it runs on the loop.
        is_default: whether it is the one of the base class.

    Raises:
        ConfigError: it cannot be called with what hooks of its kind are called with.
    """

    __slots__ = ("_by_name", "_by_position", "_method", "call", "is_async", "is_default")

    def __init__(self, owner: str, method: Callable[..., Any], values: int, default: Callable[..., Any]) -> None:
        self._method = method
        self.is_async = is_async(method)
        self.is_default = getattr(method, "__func__", None) is default
        self._by_position, self._by_name = _numbers_taken(owner, method, values, default)
        takes_as_given = self._by_position == _IDS and not self._by_name
        self.call: Callable[..., Any] = method if takes_as_given else self._call_otherwise

    def _call_otherwise(self, *given: Any) -> Any:
        values, numbers = given[: -len(_IDS)], dict(zip(_IDS, given[-len(_IDS) :], strict=True))
        by_name = {name: numbers[_OTHER_NAMES.get(name, name)] for name in self._by_name}
        return self._method(*values, *[numbers[name] for name in self._by_position], **by_name)


def _numbers_taken(
    owner: str, method: Callable[..., Any], values: int, default: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tell which numbers a hook takes by position, and which by name."""
    parameters = inspect.signature(method).parameters
    if any(one.kind is Parameter.VAR_POSITIONAL for one in parameters.values()):
        return _IDS, ()
    positional = [name for name, one in parameters.items() if one.kind in _POSITIONAL]
    given = _in_order(positional[values:])
    required = [name for name in positional[values + len(given) :] if parameters[name].default is Parameter.empty]
    if len(positional) < values or required:
        raise _wrong_arity(owner, method, default)
    left = [name for name in _IDS if name not in given]
    return given, _by_name(parameters, left)


def _in_order(names: list[str]) -> tuple[str, ...]:
    """Tell the number for each of the first names: the one it is called after, or else the next one."""
    left, taken = list(_IDS), []
    for name in names[: len(_IDS)]:
        known = _OTHER_NAMES.get(name, name)
        taken.append(left.pop(left.index(known) if known in left else 0))
    return tuple(taken)


def _by_name(parameters: Mapping[str, Parameter], left: list[str]) -> tuple[str, ...]:
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values()):
        return tuple(left)
    only = [name for name, one in parameters.items() if one.kind is Parameter.KEYWORD_ONLY]
    return tuple(name for name in only if _OTHER_NAMES.get(name, name) in left)


def _wrong_arity(owner: str, method: Callable[..., Any], default: Callable[..., Any]) -> ConfigError:
    name = default.__name__
    given, usual = (", ".join(inspect.signature(each).parameters) for each in (method, default))
    given = given if getattr(method, "__self__", None) is None else ", ".join(filter(None, ("self", given)))
    code = getattr(inspect.unwrap(method), "__code__", None)
    problem = Problem(
        f"{name} of Op {owner} cannot be called",
        file="" if code is None else code.co_filename,
        line=None if code is None else code.co_firstlineno,
        expected=f"{name}({usual}), whose numbers may be left out",
        found=f"{name}({given})",
    )
    return ConfigError([problem])


_MOST_ATTEMPTS: Final = 64
"""How many attempts of one batch may go on though they are late."""

_MOST_LATE: Final = 8
"""How many attempts in threads may go on for batches that have gone, before the worker stops to wait for them."""


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
        names = names_of_code(op.name)
        self._calls = LoopCalls(nursery, failures.closed, names=names)
        # A thread whose caller has gone still runs, and nothing else of its batch may have to wait for it; but where
        # very many attempts are made, the last of them do rather than that there is no end of threads.
        attempts = settings.batch_size * max(1, settings.retry)
        self._attempts = WorkerThreads(min(attempts, _MOST_ATTEMPTS) + _MOST_LATE, is_strict=True, names=names)
        self._threads = WorkerThreads(2, is_strict=True, names=names)
        self._places = self._threads, self._attempts, self._calls

    @property
    def is_processing(self) -> bool:
        """Whether there is something to run between ``preprocess`` and ``postprocess``."""
        return self.op.client is not None or not self.process.is_default

    @property
    def is_busy(self) -> bool:
        """Whether a hook still runs."""
        return any(place.is_busy for place in self._places)

    @property
    def is_spoiled(self) -> bool:
        """Whether the next batch cannot be worked on yet.

        Attempts of ``process`` that go on in threads hinder nobody, for there are others, until they are many.
        """
        return self._threads.is_busy or self._calls.is_busy or self._attempts.abandoned >= _MOST_LATE

    async def idle(self) -> None:
        """Wait until no hook runs any more.

        Cancellation: at once.
        """
        for place in self._places:
            await place.idle()

    def in_thread(self, function: Callable[..., Any], *args: Any) -> Coroutine[Any, Any, Any]:
        """Run code of the Op that may block, and that nobody else waits for.

        Raises:
            UserCodeRaisedError: it raised.

        Cancellation: at once; the thread goes on, and the instance is busy until it has ended.
        """
        return call_in_thread(self._threads, function, *args)

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
        call = partial(self.process.call, [dict(feed)], data_id, data_id)
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
    text = format_error(raised.error)
    message = f"init_op of Op {op.name} raised {type(raised.error).__name__}: {raised}\n{text}"
    return ConfigError([Problem(message)])
