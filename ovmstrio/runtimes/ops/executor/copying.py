"""Copies of outputs, for each of several takers may change what it gets."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any, Final

import numpy as np

from ovmstrio.core.texts import text_of
from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.values import CustomExceptionCode
from ovmstrio.work.threads.worker_threads import WorkerThreads
from ovmstrio.work.user_code.calls import call_in_thread

__all__ = ["Copier"]

_PLAIN: Final = frozenset({str, bytes, int, float, bool, complex, NoneType})
_MOST_BYTES_HERE: Final = 1 << 20
_MOST_VALUES_HERE: Final = 1000


class Copier:
    """Copies outputs: small ones of plain data at once, others in threads, for users' objects copy themselves.

    Args:
        threads: how many threads there may be.

    Attributes:
        threads: where large ones are copied, which somebody has to host.
    """

    def __init__(self, threads: int) -> None:
        refusal = failures.refusal(threads / 2, "copies of outputs")
        self.threads = WorkerThreads(threads, is_strict=True, refusal=refusal)

    async def copies(self, output: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Give each of several takers an output of its own; the last one gets the original.

        Raises:
            OpFailure: it cannot be copied.

        Ownership: the output until it returns.

        Cancellation: at once, while large outputs are copied; the thread goes on.
        """
        if count <= 1:
            return [output] * count
        try:
            if _is_small(output):
                return [*_copied(output, count - 1), output]
            return [*await call_in_thread(self.threads, _copied, output, count - 1), output]
        except Exception as error:
            text = f"an output that several need cannot be copied: {text_of(failures.cause_of(error))}"
            raise OpFailure(CustomExceptionCode.UNKNOW.value, text) from error


def _copied(output: dict[str, Any], count: int) -> list[dict[str, Any]]:
    return [copy.deepcopy(output) for _ in range(count)]


def _is_small(output: dict[str, Any]) -> bool:
    """Tell whether an output is nothing but plain data and arrays, and not much of it."""
    values: list[Any] = [output]
    size = 0
    for value in values:
        kind = type(value)
        if kind in {dict, list, tuple}:
            if len(values) + len(value) > _MOST_VALUES_HERE:
                return False
            values.extend(value.values() if kind is dict else value)
        elif kind is np.ndarray and not value.dtype.hasobject:
            size += value.nbytes
        elif kind not in _PLAIN and not issubclass(kind, np.generic):
            return False
    return size <= _MOST_BYTES_HERE
