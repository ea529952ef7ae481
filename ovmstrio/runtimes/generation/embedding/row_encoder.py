"""Rows of tokens become rows of numbers, in batches that the requests of all clients share.

Rows of about one length share an inference, so that little of it is padding.  A request of many rows takes part in as
many batches as it needs, a few at a time, and leaves room for those that come later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from ovmstrio.core.errors import Overloaded
from ovmstrio.core.hooks import NULL_BATCH_HOOKS, BatchHooks
from ovmstrio.core.tensor import Array
from ovmstrio.openvino.network import Network
from ovmstrio.runtimes.generation.embedding.text_tokens import Ids
from ovmstrio.work.batching import Batcher, BatchOptions

__all__ = ["Row", "RowEncoder"]

_TOKENS_AT_ONCE: Final = 1024
"""From some 500 tokens on a processor gains nothing more by joining rows, and others wait longer."""
_LEAST_WIDTH: Final = 16


class Row(NamedTuple):
    """The tokens of one input of the model, and their types, None where all are of type 0."""

    ids: Ids
    types: Ids | None = None


class RowEncoder:
    """Runs one model on rows, while :meth:`serve` does.

    Args:
        network: takes ``input_ids`` and what else transformers have, INT64 [rows, tokens]; gives an output a row.
        pad_id: the token that stands behind shorter rows.
        max_queue: how many requests may be answered or wait at once, beyond those that run.
        hooks: are told of batches.
    """

    def __init__(
        self,
        network: Network,
        pad_id: int,
        max_queue: int,
        hooks: BatchHooks = NULL_BATCH_HOOKS,
    ) -> None:
        self._network: Network | None = network
        self._inputs = [spec.name for spec in network.signature.inputs]
        self._pad_id = pad_id
        # The next batch of a request waits while one runs; more would only keep others from sharing what follows.
        self._at_once = network.side_by_side + 1
        self._room = max_queue + network.side_by_side
        self._requests = 0
        # What has come runs as soon as the device is free; meanwhile more comes to share it.
        options = BatchOptions(_TOKENS_AT_ONCE, 0.0, max_waiting=max(1, self._room * self._at_once), eager=True)
        self._batcher: Batcher[Sequence[Row], Array] = Batcher(
            self._run, options, concurrency=network.side_by_side, retry_singly=True, hooks=hooks
        )

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the batches until the encoder is closed.

        Cancellation: see :meth:`Batcher.serve`.
        """
        await self._batcher.serve(task_status=task_status)

    async def aclose(self) -> None:
        """Unload the model.  Called once, when no call is in flight.

        Cancellation: while batches run whose callers have gone.
        """
        await self._batcher.aclose()
        self._network = None

    async def encode(self, rows: Sequence[Row]) -> npt.NDArray[np.float32]:
        """Give the model's output for each row, of which there is one at least and none is empty: f32 [rows, numbers].

        Raises:
            Overloaded: too many requests wait.
            ModelFailure: OpenVINO failed.
            NotReady: the server stops.

        Cancellation: at any checkpoint; what waits is taken away, what runs for nobody else is stopped.
        """
        if self._requests >= self._room:
            raise Overloaded(f"{self._requests} requests are being answered or wait, as many as may; try again later")
        self._requests += 1
        try:
            return await self._encode_parts(rows, list(_parts(rows)))
        finally:
            self._requests -= 1

    async def _encode_parts(self, rows: Sequence[Row], parts: Sequence[_Part]) -> npt.NDArray[np.float32]:
        if len(parts) == 1:
            made = await self._submit(rows, parts[0])
            return _in_order(parts, [made])
        results: list[Array] = [np.empty(0)] * len(parts)
        left = iter(range(len(parts)))
        failures: list[Exception] = []

        async def work() -> None:
            for number in left:
                try:
                    results[number] = await self._submit(rows, parts[number])
                except Exception as error:  # noqa: BLE001 - raised below, alone and not in a group
                    failures.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(self._at_once, len(parts))):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        return _in_order(parts, results)

    async def _submit(self, rows: Sequence[Row], part: _Part) -> Array:
        own = [rows[number] for number in part.numbers]
        return await self._batcher.submit(own, key=part.width, size=part.width * len(own))

    async def _run(self, items: Sequence[Sequence[Row]]) -> list[Array | Exception]:
        network = self._network
        if network is None:
            raise trio.ClosedResourceError
        rows = [row for item in items for row in item]
        shape = len(rows), max(len(row.ids) for row in rows)
        (output,) = await network.infer([self._input(name, rows, shape) for name in self._inputs])
        ends = np.cumsum([len(item) for item in items])
        return list(np.split(output, ends[:-1]))

    def _input(self, name: str, rows: Sequence[Row], shape: tuple[int, int]) -> Array:
        """Make one input of the model, by the name that all transformers have for it."""
        if name == "position_ids":
            return np.ascontiguousarray(np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape))
        made = np.full(shape, self._pad_id if name == "input_ids" else 0, np.int64)
        for into, row in zip(made, rows, strict=True):
            if name == "input_ids":
                into[: len(row.ids)] = row.ids
            elif name == "attention_mask":
                into[: len(row.ids)] = 1
            elif row.types is not None:
                into[: len(row.types)] = row.types
        return made


class _Part(NamedTuple):
    """Rows of one request that are run together, by their positions, and the width that their like are counted with."""

    numbers: Sequence[int]
    width: int


def _parts(rows: Sequence[Row]) -> Iterator[_Part]:
    """Divide rows into batches of about equal lengths, short ones first."""
    numbers: list[int] = []
    width = 0
    for number in sorted(range(len(rows)), key=lambda each: len(rows[each].ids)):
        own = _width(len(rows[number].ids))
        if numbers and (own != width or width * (len(numbers) + 1) > _TOKENS_AT_ONCE):
            yield _Part(numbers, width)
            numbers = []
        width = own
        numbers.append(number)
    if numbers:
        yield _Part(numbers, width)


def _width(length: int) -> int:
    """Give the next power of two."""
    return max(_LEAST_WIDTH, 1 << max(0, length - 1).bit_length())


def _in_order(parts: Sequence[_Part], results: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Put the rows of parts where those of the request are."""
    made = np.empty((sum(len(part.numbers) for part in parts), *results[0].shape[1:]), np.float32)
    for part, result in zip(parts, results, strict=True):
        made[list(part.numbers)] = result
    return made
