"""Which samples of which pipeline the current task or thread works on, so that every log line can name them."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Final

__all__ = ["PIPELINE", "current_ids", "is_working_on", "working_on"]

_IDS: ContextVar[tuple[tuple[int, int], ...]] = ContextVar("samples", default=())

PIPELINE: Final[ContextVar[str]] = ContextVar("pipeline", default="")
"""The name of the pipeline that the current task or thread works for; empty for none."""


class working_on:  # noqa: N801 - it is called as a function, and a class is entered with half the calls
    """Name samples by data id and log id in all that is logged meanwhile; trio's threads take it over by themselves."""

    __slots__ = ("_samples", "_token")

    def __init__(self, *samples: tuple[int, int]) -> None:
        self._samples = samples

    def __enter__(self) -> None:
        self._token: Token[tuple[tuple[int, int], ...]] = _IDS.set(self._samples)

    def __exit__(self, *_: object) -> None:
        _IDS.reset(self._token)


def is_working_on(sample: tuple[int, int]) -> bool:
    """Tell whether the current task or thread works on one sample, and says so already."""
    return _IDS.get() == (sample,)


def current_ids() -> str:
    """Give the ids as a log line has them, such as ``(data_id=1 log_id=0)``; empty outside requests."""
    return " ".join(f"(data_id={data_id} log_id={log_id})" for data_id, log_id in _IDS.get())
