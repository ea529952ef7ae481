"""``process`` of a batch: samples that fit run together, attempts have a limit, and each sample its own outcome."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import trio

from ovmstrio.runtimes.ops.executor import op_failures as failures
from ovmstrio.runtimes.ops.executor.channel import Sample
from ovmstrio.runtimes.ops.executor.op_failures import OpFailure
from ovmstrio.runtimes.ops.executor.op_instance import OpInstance
from ovmstrio.runtimes.ops.predictor.protocol import FeedTypeError
from ovmstrio.runtimes.ops.tensors import LOD_SUFFIX
from ovmstrio.work.user_code.calls import UserCodeRaisedError

__all__ = ["Feed", "Outcome", "process_all"]

Row = Mapping[str, Any]


def kind_of(feed: Row) -> Hashable | None:
    """Tell with which feeds this one can be merged: those of the same kind; None if with none.

    Those have the same names, types and shapes but for the rows, of which every value has the same number.
    """
    if not all(isinstance(name, str) for name in feed):
        return None
    rows = {name: _rows(value) for name, value in feed.items() if not name.endswith(LOD_SUFFIX)}
    if len(set(rows.values())) != 1 or None in rows.values() or len(rows) != len(feed):
        return None
    return frozenset((name, *_type_of(value)) for name, value in feed.items())


def _rows(value: Any) -> int | None:
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list) else None


def _type_of(value: Any) -> tuple[Any, ...]:
    return (value.dtype.str, value.shape[1:]) if isinstance(value, np.ndarray) else ("list",)


def rows_of(feed: Row) -> int:
    """Tell how many rows a feed has that can be merged."""
    return len(next(iter(feed.values())))


def merge(feeds: Sequence[Row]) -> dict[str, Any]:
    """Put feeds of the same kind behind each other."""
    return {name: _behind_each_other([feed[name] for feed in feeds]) for name in feeds[0]}


def _behind_each_other(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [one for value in values for one in value]
    return np.concatenate(values)


def split(outputs: Mapping[str, Any], rows: Sequence[int]) -> list[dict[str, Any]] | None:
    """Give each sample its rows of every output; None if an output does not have as many rows as were fed.

    Where an output has row offsets, an entry of theirs stands for one row that was fed.
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


_RETURNED = 3

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Feed:
    """What ``preprocess`` gave, or the model: a dict, or a list of dicts."""

    data: Any
    is_skipped: bool = False


Outcome = dict[str, Any] | list[dict[str, Any]] | OpFailure


async def process_all(
    instance: OpInstance, samples: Mapping[int, Sample], feeds: Mapping[int, Feed]
) -> dict[int, Outcome]:
    """Run the model for samples, and give the outcome of each by its position.

    Ownership: the feeds until it returns.

    Cancellation: where the model waits; at once if a hook is in a thread, which goes on.
    """
    outcomes: dict[int, Outcome] = {}
    groups: dict[Hashable, list[int]] = {}
    for position, feed in feeds.items():
        try:
            _check(instance, feed.data)
            kind = kind_of(feed.data) if isinstance(feed.data, dict) else None
        except Exception as error:  # noqa: BLE001 - whatever one sample feeds, the others of its batch go on
            outcomes[position] = failures.in_process(instance.op.name, error, samples[position].log_id)
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
    """One run of the model, for samples that fit together."""

    def __init__(self, instance: OpInstance, samples: Sequence[Sample]) -> None:
        self._instance = instance
        self._samples = samples
        self._name = instance.op.name

    async def outcomes(self, feeds: Sequence[Any]) -> Sequence[Outcome]:
        """Give the outcome of each sample; if they fail together, each gets a run of its own.

        Cancellation: as :func:`process_all`.
        """
        try:
            if len(feeds) == 1:
                return [await self._in_time(feeds[0])]
            parts = split(await self._in_time(merge(feeds)), [rows_of(feed) for feed in feeds])
            if parts is not None:
                return parts
            log.warning("outputs of a batch have not the rows that were fed", op=self._name)
        except OpFailure as failure:
            return [failure] * len(feeds)
        except Exception as error:
            log.warning("process failed", op=self._name, data_ids=self._ids(), exc_info=failures.cause_of(error))
            if len(feeds) == 1:
                return [failures.in_process(self._name, error, self._samples[0].log_id)]
        return await self._singly(feeds)

    async def _singly(self, feeds: Sequence[Any]) -> list[Outcome]:
        found: list[Outcome] = []
        for sample, feed in zip(self._samples, feeds, strict=True):
            found.extend(await _Run(self._instance, [sample]).outcomes([feed]))
        return found

    def _ids(self) -> list[int]:
        return [sample.data_id for sample in self._samples]

    async def _in_time(self, feed: Any) -> Any:
        """Make attempts until one ends in time.

        Raises:
            OpFailure: none did.
        """
        limit = self._instance.settings.timeout_seconds
        if limit is None:
            return await self._attempt(feed)
        attempts = max(1, self._instance.settings.retry)
        for _ in range(attempts):
            with trio.move_on_after(limit):
                return await self._attempt(feed)
            log.warning("process took too long", op=self._name, data_ids=self._ids(), seconds=limit)
        raise failures.late(self._name, attempts, limit)

    async def _attempt(self, feed: Any) -> Any:
        if isinstance(feed, list):
            return [await self._process(one) for one in feed]
        return await self._process(feed)

    async def _process(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        returned = await self._instance.attempt(feed, self._samples[0].data_id)
        if isinstance(returned, tuple) and len(returned) == _RETURNED:
            returned, code, info = returned
            if code:
                raise failures.returned_by_process(self._name, int(code), info)
        if not isinstance(returned, dict):
            text = f"process should return a dict, got {type(returned).__name__}"
            raise UserCodeRaisedError(TypeError(text))
        return dict(returned)
