"""Many requests through a diamond with batches, failures and departures: nothing is left of them."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import psutil
import pytest
import structlog
import trio

from ovmstrio.ops import Op, PipelineRequest
from ovmstrio.runtimes.ops.config.op_settings import OpSettings
from ovmstrio.runtimes.ops.executor import Executor, open_executor
from ovmstrio.runtimes.ops.executor.channel import Sample, Ticket
from ovmstrio.runtimes.ops.tensors import from_array
from tests.support.ops import settings, text_graph

REQUESTS: Final = 20_000
CLIENTS: Final = 40
LOOK_EVERY: Final = 500
NUMBERS: Final = 8192
MOST_GROWTH_BYTES: Final = 16e6


class _Adding(Op):
    """Adds its inputs in batches; an input that begins with 1 fails in ``b``, one with 2 is late in ``c``."""

    async def preprocess(self, input_dicts: Mapping[str, Any], data_id: int = 0, log_id: int = 0) -> Any:
        await trio.lowlevel.checkpoint()
        arrays = [one["x"] for one in input_dicts.values()]
        if self.name == "b" and arrays[0].flat[0] == 1:
            raise RuntimeError("as planned")
        return {"x": np.sum(arrays, axis=0)}

    async def process(self, feed_batch: Any, typical_logid: int = 0) -> Any:
        if self.name == "c" and (feed_batch[0]["x"][:, 0] == 2).any():
            await trio.sleep(10)
        return dict(feed_batch[0])

    def postprocess(self, input_dicts: Any, fetch_data: Any, data_id: int = 0, log_id: int = 0) -> Any:
        return {"x": str(fetch_data["x"].flat[0])} if self.name == "d" else fetch_data


class _Soak:
    def __init__(self, executor: Executor) -> None:
        self.ends: Counter[int | str] = Counter()
        self.resident: list[int] = []
        self._executor = executor

    async def client(self, seed: int) -> None:
        """Send requests until there were enough, and leave every tenth."""
        chance = random.Random(seed)
        while self.ends.total() < REQUESTS:
            kind = chance.choices((1, 2, 3), (5, 1, 94))[0]
            request = PipelineRequest(tensors=[from_array("x", np.full((1, NUMBERS), kind, np.float32))])
            with trio.move_on_after(chance.choice((0.001, 0.004)) if chance.random() < 0.1 else 60) as scope:
                response = await self._executor.infer(request)
                assert response.err_no or float(response.values[0]) in {kind, 2 * kind}
                self.ends[response.err_no] += 1
            self.ends["left"] += scope.cancelled_caught
            if self.ends.total() % LOOK_EVERY == 0:
                gc.collect()
                self.resident.append(psutil.Process().memory_info().rss)


def count_objects(kind: type) -> int:
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


@pytest.mark.slow
@pytest.mark.parametrize("takes_first", [False, True])
async def test_memory_reaches_a_plateau(takes_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("processing", "stages"):
        monkeypatch.setattr(
            f"ovmstrio.runtimes.ops.executor.{module}.log", structlog.wrap_logger(None, processors=[_drop])
        )
    one = OpSettings(batch_size=4, auto_batching_timeout=2, timeout=20, concurrency=2)
    pipeline = settings(
        worker_num=24, channel_size=4, channel_recv_frist_arrive=takes_first, ops=dict.fromkeys("abcd", one)
    )
    async with open_executor(text_graph("a<@", "b<a", "c<a", "d<b c", make=_Adding), pipeline) as executor:
        soak = _Soak(executor)
        async with trio.open_nursery() as nursery:
            for seed in range(CLIENTS):
                nursery.start_soon(soak.client, seed)
        assert executor.in_flight == 0
        with trio.fail_after(60):
            # Threads of requests whose callers left end later than the requests, without any event.
            while (count_objects(Sample), count_objects(Ticket)) != (0, 0):  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert soak.ends.total() >= REQUESTS
    quarter = len(soak.resident) // 4
    assert max(soak.resident[-quarter:]) - max(soak.resident[quarter : 2 * quarter]) < MOST_GROWTH_BYTES
