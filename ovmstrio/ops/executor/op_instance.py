"""Copy of an Op for one worker: hooks, model and the threads of synchronous hooks."""

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
from ovmstrio.isolation.user_code import AbandonableLoopCalls, UserCodeRaisedError, call_in_thread, is_async
from ovmstrio.ops.executor import failures
from ovmstrio.ops.observing.log_files import log_fields_of
from ovmstrio.ops.op import Op
from ovmstrio.ops.predictor.protocol import CreatePredictor
from ovmstrio.ops.settings import OpSettings
from ovmstrio.util.truncation import format_error

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
        self.preprocess, self.process, self.postprocess = get_hooks(op)
        names = log_fields_of(op.name)
        self._calls = AbandonableLoopCalls(nursery, failures.closed_failure, names=names)
        # An abandoned thread still runs and must not delay the rest of its batch.  The bound on threads is stronger:
        # with very many attempts the last ones wait.
        attempts = settings.batch_size * max(1, settings.retry)
        self._attempts = WorkerThreads(
            min(attempts, _MAX_ATTEMPT_THREADS) + _MAX_ABANDONED, is_strict=True, names=names
        )
        self._threads = WorkerThreads(2, is_strict=True, names=names)
        self._executors = self._threads, self._attempts, self._calls

    @property
    def is_processing(self) -> bool:
        """Whether the Op has a model or overrides ``process``."""
        return self.op.client is not None or not self.process.is_default

    @property
    def is_busy(self) -> bool:
        """Whether a hook still runs."""
        return any(executor.is_busy for executor in self._executors)

    @property
    def needs_recovery(self) -> bool:
        """Whether the next batch cannot start yet.

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
        if self.process.is_default:
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
        if self.op.client is not None:
            self.op.client.close()


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
        raise init_error(op, raised) from raised.error


def init_error(op: Op, raised: UserCodeRaisedError) -> ConfigError:
    """Return the error of an ``init_op`` that raised, with its traceback."""
    text = format_error(raised.error)
    message = f"init_op of Op {op.name} raised {type(raised.error).__name__}: {raised}\n{text}"
    return ConfigError([Problem(message)])
