"""Tuner of one model: where its inferences run, how many at once, and whether its threads are pinned to cores.

The inputs are measured times of inferences and the load of the event loop. The model's network reads the decision
before each inference, records the time after each, and recompiles the model as decided.

::

    QUEUE, STREAMS <─> LOOP     times of an input size stay a quarter above, or a fifth below, the limit
    LOOP ─> CONTENDED ─> LOOP   the event loop is full; few calls are in flight for 32 calls
    LOOP ─> BLOCKED ─> LOOP     an inference blocked the event loop; 500 times its duration has passed
    any ─> RECOVERING ─> same   a run failed; the model passed a test
                      ─> REDUCED ─> STREAMS   the model was reloaded with one stream; a growing pause has passed

Leaving the event loop costs an inference about 30 µs of CPU and 75 to 280 µs of latency, however short it is. Staying
blocks the loop. An inference that takes all cores is cheap there for a lone call; under contention each call would also
wait for the loop's other work, and the loop for cold caches after each inference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Any, Final, Literal
from weakref import WeakMethod, WeakSet

import structlog
import trio

from ovmstrio.core.hooks import NULL_HOOKS, ServableHooks
from ovmstrio.telemetry.loop_utilization import LoopUtilization, current_loop_utilization
from ovmstrio.util.backoff import Backoff
from ovmstrio.util.container_limits import free_memory
from ovmstrio.util.cores import CORES, CoreShare

log = structlog.get_logger(__name__)

# ----------------------------------------------------------------------
# Limits of inferences on the event loop
# ----------------------------------------------------------------------

INLINE_THRESHOLD_SECONDS: Final = 200e-6
"""Inferences that are expected to be shorter run inline."""
FEW_CORES_THRESHOLD_SECONDS: Final = 500e-6
"""Inline threshold on few cores, for inferences that run in the calling thread.

Up to about this time leaving the event loop costs as much as it saves there.
"""
FILLING_THRESHOLD_SECONDS: Final = 1e-3
"""Inline threshold on few cores, for inferences that use all cores and so run one after the other anyway.

Leaving the event loop costs about 300 µs of CPU there, partly taken from inferences (benchmarks/RESULTS.md).
"""
SURELY_SHORT_SECONDS: Final = INLINE_THRESHOLD_SECONDS / 2
"""Inferences that are shorter may run inline at any load."""

_BUSY: Final = 0.9  # share of time from which the limit is that of a busy loop
_BUSY_THRESHOLD_SECONDS: Final = INLINE_THRESHOLD_SECONDS / 2
_FULL: Final = 0.97  # share of time from which calls leave the loop
_STEP: Final = 1.03
_RANGE: Final = 8
_LEAVE_FACTOR: Final = 1.25
_RETURN_FACTOR: Final = 0.8
_PROBE_FACTOR: Final = 3
_PROBE_INTERVAL: Final = 128
_QUIET_CALLS: Final = 32
_COOLDOWN_SECONDS: Final = 1.0
_LONG_INLINE_SECONDS: Final = 0.02
_CPU_TIMED_RUNS: Final = 64  # inferences whose CPU time is measured after one that was not short
# An inference that blocked the loop keeps later ones off it for this multiple of its time.
_LOOP_BLOCK_FACTOR: Final = 500

# Concurrency
_BUSY_FRACTION: Final = 0.6
_GROW_CONCURRENCY: Final = 1.8
_SHRINK_CONCURRENCY: Final = 1.3
_SHRINK_SECONDS: Final = 60.0
_GROWTH_FACTOR: Final = 2
_LONG_SECONDS: Final = 1e-3
_LONG_CALLS: Final = 8

# Streams lost to a failure
_FIRST_PAUSE_SECONDS: Final = 30.0
_MAX_PAUSE_SECONDS: Final = 3600.0
_STABLE_SECONDS: Final = 600.0  # after this time without failure the pauses start again from the first


@dataclass(frozen=True, slots=True)
class Placement:
    """Initial place of a compiled model's inferences, from its first measured times.

    Attributes:
        inline_bytes: the maximum input size of inline inferences until their times are known; -1 for no inline
            inferences.
        input_bytes: the input size that was measured.
        is_one_size: all inputs have the same size.
        learns: measured times change the decision.
        most: the inline threshold in seconds.
        limit: a threshold in seconds that replaces the one of the event loop's load, as the inference fills the cores.
    """

    inline_bytes: float
    input_bytes: int = 0
    is_one_size: bool = False
    learns: bool = False
    most: float = INLINE_THRESHOLD_SECONDS
    limit: float | None = None

    @classmethod
    def away(cls) -> Placement:
        """Create a placement without inline inferences."""
        return cls(-1)

    @classmethod
    def measured(
        cls,
        seconds: float,
        input_bytes: int,
        *,
        fixed_shape: bool,
        most: float = INLINE_THRESHOLD_SECONDS,
        limit: float | None = None,
    ) -> Placement:
        """Create a placement from one measured time of an inference on ``input_bytes``.

        ``limit``, or else ``most``, is the inline threshold in seconds.  Without a fixed shape, time is assumed to be
        proportional to the input size.
        """
        inline_bytes, most = -1.0, limit or most
        if seconds < most:
            inline_bytes = math.inf if fixed_shape else max(input_bytes, 1) * most / seconds
        return cls(inline_bytes, input_bytes, fixed_shape, True, most, limit)

    @property
    def is_inline(self) -> bool:
        """Return whether inputs of the measured size run inline."""
        return self.input_bytes <= self.inline_bytes


class TunerState(Enum):
    """State of a tuner for inputs of the measured size, as shown in the model's introspection."""

    LOOP = "loop"
    """Inferences run on the event loop."""
    CONTENDED = "contended"
    """Inferences are short, and queued because the event loop is full."""
    BLOCKED = "blocked"
    """Inferences are short, and queued because one of them blocked the event loop or its model is reloaded."""
    QUEUE = "queue"
    """Inferences are queued for one stream of OpenVINO."""
    STREAMS = "streams"
    """Inferences are queued for several streams."""
    REDUCED = "reduced"
    """Inferences are queued for one stream, as the others were lost to a failure."""
    RECOVERING = "recovering"
    """Inferences wait until the model is tested or reloaded after a failure."""


LOOP: Final = TunerState.LOOP
"""The state as a module's variable, for the hot path."""


@dataclass(slots=True)
class _SizeClass:
    """Measurements of inferences with inputs of about one size; ``seconds`` is about their median."""

    seconds: float
    inline: bool
    away_count: int = 0


class ModelTuner:
    """Decisions for one model; used on its event loop only, and once per inference.

    Args:
        placement: the placement of the compiled model.
        max_concurrency: the maximum number of concurrent inferences to compile for; 0 if the server must not choose.
        cores: cores that a single inference uses if no other runs.
        is_for_loop: the model is first compiled for one thread, because its inferences are short.
        is_pinned: the threads are pinned to cores; None if the server must not choose.
        weight_bytes: the size of the weights, which are in memory twice during a recompilation.
        load: the load of the event loop; None for the one that first uses the tuner.
        clock: ``perf_counter``, or a clock of tests.

    Attributes:
        loop_state: ``LOOP`` if short inferences may run on the event loop, else ``CONTENDED``, ``BLOCKED`` or
            ``RECOVERING``.
        fills_cores: an inference on the event loop takes all cores, so that contention counts.
        cpu_timings_left: number of next inferences on the event loop whose CPU time is needed.
        streams: the number of streams of the compiled model.
        concurrency: the concurrency for which the model is compiled; 0 for one thread on the event loop.
        target: the concurrency for which it should be compiled.
        is_pinned: as the argument.
        failures: the number of failures so far.
        recompile: weak reference to the method that recompiles the model as decided, while calls continue.
    """

    __slots__ = (
        "__weakref__",
        "_backoff",
        "_blocked_until",
        "_busy_limit",
        "_clock",
        "_computes_on_loop",
        "_concurrent_seconds",
        "_cooldown_until",
        "_due_at",
        "_few_since",
        "_hooks",
        "_is_for_loop",
        "_limit",
        "_load",
        "_long_at",
        "_long_calls",
        "_long_on_cores",
        "_long_seconds",
        "_looked_at",
        "_pause",
        "_placement",
        "_quiet_calls",
        "_recovered",
        "_restored_at",
        "_seconds",
        "_sizes",
        "_state_after_recovery",
        "concurrency",
        "cpu_timings_left",
        "failures",
        "fills_cores",
        "is_pinned",
        "loop_state",
        "max_concurrency",
        "recompile",
        "streams",
        "target",
        "weight_bytes",
    )

    def __init__(
        self,
        placement: Placement,
        hooks: ServableHooks = NULL_HOOKS,
        *,
        max_concurrency: int = 0,
        cores: int = 1,
        is_for_loop: bool = False,
        is_pinned: bool | None = None,
        weight_bytes: int = 0,
        load: LoopUtilization | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._hooks = hooks
        self._clock = clock
        self._load = load
        self.weight_bytes = weight_bytes
        self.recompile: WeakMethod[Callable[[], Awaitable[None]]] | None = None
        # Event loop
        self.loop_state = LOOP
        self._cooldown_until = self._blocked_until = 0.0
        self._quiet_calls = 0
        self.cpu_timings_left = _CPU_TIMED_RUNS
        self._computes_on_loop = False
        # Compilation
        self.streams = 1
        self.is_pinned = is_pinned
        self.max_concurrency = max_concurrency
        self.concurrency = self.target = 0 if is_for_loop else 1
        self._is_for_loop = is_for_loop
        # An inference that is long on one thread is shorter on all cores, and must stay there.
        self._long_on_cores = _LONG_SECONDS / cores
        now = clock()
        self._looked_at = self._few_since = self._long_at = now
        self._long_calls = 0
        self._concurrent_seconds = self._seconds = self._long_seconds = 0.0
        # Failures
        self.failures = 0
        self._recovered: trio.Event | None = None
        self._state_after_recovery = LOOP
        self._backoff = Backoff(_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS, _STABLE_SECONDS)
        self._restored_at, self._pause, self._due_at = now, 0.0, math.inf
        self.place(placement)

    @property
    def state(self) -> TunerState:
        """State for inputs of the measured size."""
        if self.loop_state is TunerState.RECOVERING or self.is_inline_by_default:
            return self.loop_state
        if self.has_lost_streams:
            return TunerState.REDUCED
        return TunerState.STREAMS if self.streams > 1 else TunerState.QUEUE

    # ------------------------------------------------------------------
    # Event loop or queue
    # ------------------------------------------------------------------

    @property
    def is_inline_by_default(self) -> bool:
        """Return whether inputs of the measured size run on the event loop, unless it is contended or blocked."""
        placement = self._placement
        known = self._sizes.get(0 if placement.is_one_size else placement.input_bytes.bit_length())
        return placement.is_inline if known is None else known.inline

    def place(self, placement: Placement) -> None:
        """Start with the placement of a model that was compiled, and forget the measured times."""
        self._placement = placement
        self._sizes: dict[int, _SizeClass] = {}
        self.fills_cores = placement.limit is not None
        if self.loop_state is TunerState.CONTENDED and not self.fills_cores:
            self.loop_state = LOOP
        self._set_limits()

    def set_streams(self, streams: int, *, computes_on_loop: bool) -> None:
        """Set the streams of the model; ``computes_on_loop`` if the loop's own thread computes inline inferences."""
        self.streams = streams
        self._computes_on_loop = computes_on_loop
        self._set_limits()
        self._hooks.set_streams(streams)

    def _set_limits(self) -> None:
        if self._placement.limit:
            self._limit = self._busy_limit = self._placement.limit
        elif CORES.are_few:
            # An inference that leaves a busy loop would compete with the loop for its core.
            few = FEW_CORES_THRESHOLD_SECONDS if self._computes_on_loop else INLINE_THRESHOLD_SECONDS
            self._limit = self._busy_limit = few
        else:
            self._limit, self._busy_limit = INLINE_THRESHOLD_SECONDS, _BUSY_THRESHOLD_SECONDS

    def is_inline(self, input_bytes: int) -> bool:
        """Return whether an inference on ``input_bytes`` runs on the event loop, unless it is contended or blocked.

        Of sizes up to 3 times slower than the threshold, one of 128 inferences runs there to measure the time again.
        """
        placement = self._placement
        known = self._sizes.get(0 if placement.is_one_size else input_bytes.bit_length())
        if known is None:
            return input_bytes <= placement.inline_bytes
        if known.inline or known.seconds > _PROBE_FACTOR * placement.most:
            return known.inline
        known.away_count += 1
        return known.away_count % _PROBE_INTERVAL == 0

    def leaves_contended_loop(self, others: int) -> bool:
        """Return whether a call leaves the loop under contention, if :attr:`fills_cores`.

        ``others`` is the number of unanswered calls that have left it.
        """
        if self.loop_state is LOOP:
            load = self._load or self._watch_loop()
            if load.busy <= _FULL or self._clock() < self._cooldown_until:
                return False
            self.loop_state, self._quiet_calls = TunerState.CONTENDED, 0
            return True
        if self.loop_state is not TunerState.CONTENDED:
            is_recovering = self.loop_state is TunerState.RECOVERING
            return is_recovering and self._state_after_recovery is TunerState.CONTENDED
        if others > 1:
            self._quiet_calls = 0
            return True
        self._quiet_calls += 1
        if self._quiet_calls <= _QUIET_CALLS:
            return True
        # Other work may have filled the loop, so wait before the next switch.
        self.loop_state, self._cooldown_until = LOOP, self._clock() + _COOLDOWN_SECONDS
        return False

    def may_use_loop(self) -> bool:
        """Return whether the event loop may infer now; True without a call if :attr:`loop_state` is ``LOOP``."""
        if self.loop_state is TunerState.BLOCKED and self._clock() > self._blocked_until:
            self.unblock_loop()
        return self.loop_state in (LOOP, TunerState.CONTENDED)

    @property
    def is_loop_overdue(self) -> bool:
        """Return whether other tasks of the event loop should run before an inference."""
        return (self._load or self._watch_loop()).is_overdue

    def record(self, input_bytes: int, seconds: float, *, on_loop: bool) -> None:
        """Record the time of an inference, which may change where inferences of its size run.

        One short run on the loop makes a size inline again.  Otherwise the decision changes only after times well above
        or below the threshold.
        """
        if on_loop and self.cpu_timings_left:
            self.cpu_timings_left -= 1
        placement = self._placement
        if not placement.learns:
            return
        load = self._load or self._watch_loop()
        limit = self._busy_limit if load.busy > _BUSY else self._limit
        size = 0 if placement.is_one_size else input_bytes.bit_length()
        known = self._sizes.get(size)
        if known is None:
            inline = input_bytes <= placement.inline_bytes
            known = self._sizes[size] = _SizeClass(limit / 2 if inline else 2 * limit, inline)
        # Constant steps converge to the median, so that a few long times on a shared machine have no effect.
        step = _STEP if seconds > known.seconds else 1 / _STEP
        known.seconds = min(max(known.seconds * step, limit / _RANGE), limit * _RANGE)
        if on_loop and not known.inline and seconds < limit * _RETURN_FACTOR:
            known.seconds = limit / 2
        if known.inline != (known.seconds < limit * (_LEAVE_FACTOR if known.inline else _RETURN_FACTOR)):
            known.inline = not known.inline
            self._hooks.set_execution_mode(inline=known.inline, changed=True)

    def record_long(self, input_bytes: int, begin: float, taken: float, cpu_before: float | None) -> None:
        """Record an inference on the loop that was not short, and block the loop for later ones if it was long.

        ``cpu_before`` is the thread's CPU time at the start. It is None after many short inferences, as reading that
        clock costs more than all other bookkeeping; such a run never blocks the loop.
        """
        worked = taken
        if cpu_before is not None:
            # CPU time excludes preemption by other processes. It is usable only if this thread does the work itself.
            worked = min(taken, time.thread_time() - cpu_before) if self._computes_on_loop else taken
            if worked > _LONG_INLINE_SECONDS:
                self.block_loop(begin + _LOOP_BLOCK_FACTOR * taken)
        self.record(input_bytes, worked, on_loop=True)
        self.cpu_timings_left = _CPU_TIMED_RUNS
        if self.max_concurrency:
            self.record_concurrency(1, taken)

    def block_loop(self, until: float = math.inf) -> None:
        """Keep inferences off the event loop until a ``perf_counter`` time."""
        self._blocked_until = until
        self._enter(TunerState.BLOCKED)

    def unblock_loop(self) -> None:
        """Allow inferences on the event loop again."""
        self._enter(LOOP)

    def _enter(self, state: TunerState) -> None:
        if self._recovered is None:
            self.loop_state = state
        else:
            self._state_after_recovery = state

    def _watch_loop(self) -> LoopUtilization:
        self._load = current_loop_utilization()
        return self._load

    # ------------------------------------------------------------------
    # Concurrency: the number of streams
    # ------------------------------------------------------------------

    def record_concurrency(self, calls: float, seconds: float) -> None:
        """Record a call with the number of concurrent calls and its device seconds, if ``max_concurrency`` is set."""
        self._concurrent_seconds += calls * seconds
        self._seconds += seconds
        if seconds >= (self._long_on_cores if self.concurrency else _LONG_SECONDS):
            self._long_calls += 1
            self._long_seconds += seconds

    def wants_recompilation(self) -> bool:
        """Return whether the calls since the last check need another concurrency, or lost streams are due.

        Always False if the user configured the concurrency and no stream was lost.
        """
        if self.has_lost_streams:
            return self.are_streams_due
        if not self.max_concurrency:
            return False
        self.target = self._target_concurrency()
        return self.target != self.concurrency

    def _target_concurrency(self) -> int:
        """Return the desired concurrency from the calls since the last check, and reset the figures.

        More than 1 only if the device was busy; back to 1 after a minute of lone or no calls. 0 (one thread) while
        short calls take most of the time, and again after a minute of that.
        """
        now = self._clock()
        passed, self._looked_at = now - self._looked_at, now
        average = self._concurrent_seconds / self._seconds if self._seconds else 0.0
        busy = self._seconds / passed if passed > 0 else 0.0
        is_long = self._long_calls >= _LONG_CALLS and self._long_seconds > self._seconds / 2
        self._long_calls = 0
        self._concurrent_seconds = self._seconds = self._long_seconds = 0.0
        if average >= _SHRINK_CONCURRENCY:
            self._few_since = now
        if is_long or not self._is_for_loop:
            self._long_at = now
        if (self.concurrency == 0 and not is_long) or now - self._long_at >= _SHRINK_SECONDS:
            return 0
        wanted = min(round(average), self.max_concurrency)
        if (
            average >= _GROW_CONCURRENCY
            and busy >= _BUSY_FRACTION
            and (self.concurrency <= 1 or wanted >= _GROWTH_FACTOR * self.concurrency)
        ):
            return max(wanted, self.concurrency, 1)
        return 1 if self.concurrency == 0 or now - self._few_since >= _SHRINK_SECONDS else self.concurrency

    def finish_recompilation(
        self, concurrency: int, *, is_pinned: bool | None, is_bound: bool, was_shared: bool
    ) -> None:
        """Record that the model now is the one compiled for a concurrency, with all its streams.

        ``is_pinned`` is as the argument of the tuner, ``is_bound`` what OpenVINO reports, and ``was_shared`` whether
        the cores were shared when the compilation began.
        """
        if self.has_lost_streams:
            self._pause, self._due_at, self._restored_at = 0.0, math.inf, self._clock()
        if self.max_concurrency:
            self.concurrency = concurrency
        self.is_pinned = is_pinned
        if is_pinned is not None:
            self._hooks.set_cpu_pinning(to_cores=is_bound, changed=True)
            # If OpenVINO does not pin this model by default, there is nothing to choose.
            self.is_pinned = is_bound if is_bound or was_shared or CORES.is_shared else None

    def fail_recompilation(self) -> None:
        """Record that the recompilation failed: lost streams are due later, the concurrency never changes again."""
        if self.has_lost_streams:
            self._lose_streams()
        else:
            self.max_concurrency = 0

    # ------------------------------------------------------------------
    # Failures
    # ------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """Return whether no failure is waiting for recovery."""
        return self._recovered is None

    async def wait_healthy(self) -> None:
        """Wait until the model is healthy, at least for a moment."""
        if self._recovered is not None:
            await self._recovered.wait()

    def begin_recovery(self) -> bool:
        """Record a failure; nothing may start until :meth:`end_recovery`. False if the model had failed already."""
        if self._recovered is not None:
            return False
        self._state_after_recovery, self.loop_state = self.loop_state, TunerState.RECOVERING
        self._recovered = trio.Event()
        self.failures += 1
        return True

    def end_recovery(self) -> None:
        """Record that the model is healthy or was replaced."""
        if self._recovered is not None:
            self._recovered.set()
            self._recovered = None
            self.loop_state = self._state_after_recovery

    @property
    def has_lost_streams(self) -> bool:
        """Return whether the model runs on one stream instead of several since a failure."""
        return self._pause > 0

    @property
    def are_streams_due(self) -> bool:
        """Return whether lost streams should be restored now."""
        return self.has_lost_streams and self._clock() >= self._due_at

    def lose_streams(self) -> None:
        """Record that a failed model was reloaded with one unpinned stream; others are due after a growing pause."""
        if self.streams > 1:
            log.warning("model reduced to one stream after a failure", seconds=self._lose_streams())
            if self.is_pinned is not None:
                self.is_pinned = None
                self._hooks.set_cpu_pinning(to_cores=False, changed=False)

    def _lose_streams(self) -> float:
        now = self._clock()
        self._pause = self._backoff.seconds_after(0.0 if self.has_lost_streams else now - self._restored_at)
        self._due_at = now + self._pause
        return self._pause

    def delay_streams(self) -> None:
        """Restart the pause of lost streams after another failure."""
        if self.has_lost_streams:
            self._due_at = self._clock() + self._pause


# ----------------------------------------------------------------------
# All models of a server
# ----------------------------------------------------------------------

CoreSharing = Literal["auto", "off"]

_POLL_SECONDS: Final = 5.0
_UNPIN_AFTER_SECONDS: Final = 10.0
"""Time with several busy models before a pinned model is recompiled without pinning."""
_PIN_AFTER_SECONDS: Final = 120.0
"""Time with one busy model before it is pinned again: other models may return, and the gain is small."""
_COPIES: Final = 2
"""Free memory required for a recompilation, in multiples of the weights."""


async def recompile_models(
    sharing: CoreSharing,
    cores: CoreShare = CORES,
    *,
    room: Callable[[], float] = free_memory,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Recompile models as their tuners decide, with or without CPU pinning as others come and go, until cancelled.

    One model is compiled at a time, each once per change.  A model without enough free memory (``room``, in bytes)
    keeps its pinning.  ``off`` disables all changes.

    Cancellation: the model being compiled keeps its pinning.
    """
    cores.chooses = sharing == "auto"
    task_status.started()
    is_shared, since = cores.is_shared, trio.current_time()
    updated: WeakSet[ModelTuner] = WeakSet()
    without_memory: WeakSet[ModelTuner] = WeakSet()
    while cores.chooses:
        await trio.sleep(_POLL_SECONDS)
        if cores.is_shared != is_shared:
            is_shared, since = cores.is_shared, trio.current_time()
            updated.clear()
        # Weak, so that unloaded models neither stay in memory nor count as busy.
        candidates: WeakSet[ModelTuner] = WeakSet([each for each in cores.users if each.wants_recompilation()])
        candidates -= without_memory
        while candidates:
            await _recompile(candidates.pop(), room, without_memory)
        if trio.current_time() - since >= (_UNPIN_AFTER_SECONDS if is_shared else _PIN_AFTER_SECONDS):
            while (user := _next_user(cores, updated)) is not None and cores.is_shared is is_shared:
                updated.add(user)
                await _recompile(user, room, without_memory)
            del user


async def _recompile(tuner: ModelTuner, room: Callable[[], float], without_memory: WeakSet[ModelTuner]) -> None:
    if _COPIES * tuner.weight_bytes > room():
        without_memory.add(tuner)
        log.info("CPU pinning unchanged: not enough memory to recompile", weights=tuner.weight_bytes)
    elif tuner.recompile is not None and (recompile := tuner.recompile()) is not None:
        await recompile()


def _next_user(cores: CoreShare, updated: WeakSet[ModelTuner]) -> Any:
    """Return the tuner of a model with the wrong pinning that was not changed yet, or None."""
    is_shared = cores.is_shared
    return next((each for each in cores.users if each.is_pinned is is_shared and each not in updated), None)
