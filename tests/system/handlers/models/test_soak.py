from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.runtimes.handlers.models.library import LibraryOptions, ModelLibrary, open_library
from ovmstrio.runtimes.handlers.models.watching import WatchOptions
from tests.support.model_projects import Loads, models_in, paths_below
from tests.support.s3 import Bucket, s3_server

pytest.importorskip("s3fs")
pytest.importorskip("moto")

_SECONDS = 8.0
_CLIENTS = 50
_STABLE = "abcd"
_ABSENT = ("was not found", "wasn't found", "all of them were removed", "does not exist")


class _Load:
    def __init__(self, library: ModelLibrary) -> None:
        self.library = library
        self.calls = Counter[str]()
        self.failed: list[str] = []
        self._limiter = trio.CapacityLimiter(16)

    def _call(self, name: str) -> None:
        with lease_models():
            model = self.library.client.get_model(name)
            assert (model.folder / "model.txt").read_text() == model.text

    async def run(self, seed: int) -> None:
        choice = random.Random(seed)
        while True:
            name = choice.choice([*_STABLE, "guest"])
            try:
                await trio.to_thread.run_sync(self._call, name, limiter=self._limiter)
            except UserRuntimeException as error:
                if name != "guest" or not any(text in str(error) for text in _ABSENT):
                    self.failed.append(str(error))
            self.calls[name] += 1
            await trio.sleep(0.01)


async def _change(bucket: Bucket, round_: int) -> None:
    """Change, add and remove models."""

    def work() -> None:
        bucket.put(f"up/{_STABLE[round_ % 4]}/1/model.txt", f"{round_} " * 1000)
        bucket.put(f"up/{_STABLE[(round_ + 1) % 4]}/{round_ + 2}/model.txt", f"{round_} " * 1000)
        if round_ >= 4:
            bucket.remove(f"up/{_STABLE[(round_ + 1) % 4]}/{round_ - 2}/")
        if round_ % 2:
            bucket.put("up/guest/1/model.txt", "guest")
        else:
            bucket.remove("up/guest/")

    await trio.to_thread.run_sync(work)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(), (2, 3)])
async def test_a_bucket_that_changes_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    """No call fails but for what is really absent, and memory, disk and threads are as they were before."""
    with s3_server("models") as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        for name in _STABLE:
            bucket.put(f"up/{name}/1/model.txt", name)
        watch = WatchOptions(interval_seconds=0.1)
        loads: Any = Loads()
        options = LibraryOptions(watch, tmp_path)
        async with open_library(models_in("s3://models/up", *sizes), load_model=loads, options=options) as library:
            load, resident = _Load(library), list[int]()
            async with trio.open_nursery() as nursery:
                for seed in range(_CLIENTS):
                    nursery.start_soon(load.run, seed)
                end, round_ = trio.current_time() + _SECONDS, 0
                while trio.current_time() < end:
                    await _change(bucket, round_)
                    await trio.sleep(0.2)
                    resident.append(psutil.Process().memory_info().rss)
                    round_ += 1
                nursery.cancel_scope.cancel()
            await library.watcher.wait_look()
            assert load.failed == []
            assert load.calls.total() > 500
            assert max(resident[-5:]) - max(resident[: len(resident) // 2]) < 20e6
            memory, disk = library.shelf.counts()
            assert memory <= (sizes[0] if sizes else disk)
            # Models that nobody has asked for since they changed keep the files that they were loaded from.
            wanted = set(library.shelf.copies().values()) | {each.copy for each in library.shelf._loaded.values()}  # noqa: SLF001 - files of loaded models show nowhere else
            kept = {copy.folder for copy in wanted}
            while await trio.to_thread.run_sync(paths_below, tmp_path, "*/*/*/*") != kept:
                await trio.lowlevel.checkpoint()
