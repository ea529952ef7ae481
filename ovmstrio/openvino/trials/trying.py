"""The trials of the server that loads a model: whoever loads one asks here first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Literal

import trio

from ovmstrio.openvino.trials.memory import TrialMemory
from ovmstrio.openvino.trials.pool import LAYER_SECONDS, TrialPool
from ovmstrio.openvino.trials.trial import Trial, Verdict

__all__ = ["TrialMode", "try_model", "try_model_from_thread", "trying_models"]

TrialMode = Literal["auto", "off", "again"]
"""Whether models are tried that were never seen to run; ``again`` tries those, too, that crashed."""

# Code of users may load models as well, in threads that know of no server but by their context.
_current: Final[ContextVar[TrialPool | None]] = ContextVar("trials of models", default=None)


@contextmanager
def trying_models(
    nursery: trio.Nursery, mode: TrialMode, folder: Path | None, *, layer_seconds: float = LAYER_SECONDS
) -> Iterator[None]:
    """Have models tried that tasks load which start in the block.

    Args:
        nursery: hosts the processes, which end when it is cancelled.
        mode: whether at all.
        folder: where verdicts are remembered.
        layer_seconds: timeout of the search for the layer that crashes.
    """
    if mode == "off":
        yield
        return
    memory = TrialMemory(folder)
    before = _current.set(TrialPool(nursery, memory, tries_again=mode == "again", layer_seconds=layer_seconds))
    try:
        yield
    finally:
        _current.reset(before)


async def try_model(trial: Trial) -> Verdict:
    """Return once a model may be loaded; at once where none are tried.

    Raises:
        ConfigError: OpenVINO crashes, or the model cannot be compiled.
        NotReady: it could not be tried.

    Cancellation: at once; the trial is given up.
    """
    pool = _current.get()
    return Verdict() if pool is None else await pool.try_model(trial)


def try_model_from_thread(trial: Trial) -> None:
    """Do as :func:`try_model`, from a thread that is not the event loop's; what loads on the loop is not tried.

    Raises:
        ConfigError, NotReady: as :func:`try_model`.
    """
    pool = _current.get()
    if pool is not None and not trio.lowlevel.in_trio_run():
        trio.from_thread.run(pool.try_model, trial, trio_token=pool.token)
