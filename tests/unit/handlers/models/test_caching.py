from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.errors import StorageFailure
from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.runtimes.handlers.models.library import ModelLibrary
from tests.support.examples import examples
from tests.support.model_projects import (
    CountingStorage,
    Loads,
    Model,
    library_over,
    models_in,
    next_look,
    paths_below,
    wait_gone,
    write_model,
)
from tests.support.waits import WAIT_SECONDS


def _models(root: Path, *names: str) -> Path:
    for name in names:
        write_model(root, name, "up", name)
    return root / "up"


def _ask(library: ModelLibrary, name: str) -> str:
    """Make a call of the handler that uses a model."""
    with lease_models():
        model: Model = library.client.get_model(name)
        assert (model.folder / "model.txt").read_text() == model.text
        return model.text


async def test_limits_hold_after_every_call(tmp_path: Path) -> None:
    """With one model in memory and two on disk, the least recently used go, and a hit on disk fetches nothing."""
    up, loads, storage = _models(tmp_path, "a", "b", "c", "d"), Loads(), CountingStorage()
    async with library_over(models_in(up, 1, 2), tmp_path / "down", loads, storage) as library:
        assert library.client.caching is True
        assert storage.fetched == []
        for name in "aabacda":
            assert await trio.to_thread.run_sync(_ask, library, name) == name
            memory, disk = library.shelf.counts()
            assert memory == 1
            assert disk <= 2
            assert len(paths_below(tmp_path / "down", "*/*/*/1")) >= disk
        assert loads.versions == ["a/1", "b/1", "a/1", "c/1", "d/1", "a/1"]
        assert [Path(location).parts[-2] for location in storage.fetched] == ["a", "b", "c", "d", "a"]
        assert sorted(library.client.metadata) == ["a", "b", "c", "d"]


async def test_what_is_in_use_is_not_evicted(tmp_path: Path) -> None:
    """Two calls at once may hold more models than the limit; when they end, the limits hold again."""
    up, loads = _models(tmp_path, "a", "b"), Loads()
    async with library_over(models_in(up, 1, 1), tmp_path / "down", loads) as library:
        with lease_models():
            first = library.client.get_model("a")
            with lease_models():
                second = library.client.get_model("b")
                assert library.client.get_model("b") is second
                assert library.shelf.counts() == (2, 2)
                assert first.folder.is_dir()
            assert library.client.get_model("a") is first
            assert library.shelf.counts() == (1, 1)
        assert library.client.get_model("a") is first
        assert library.client.get_model("b") is not second


async def test_an_old_copy_in_use_does_not_keep_the_new_one(tmp_path: Path, mock_clock: MockClock) -> None:
    """A call goes on with the files of what a model was before, while what it is now makes room for others."""
    up, loads = _models(tmp_path, "a", "b"), Loads()
    async with library_over(models_in(up, 1, 1), tmp_path / "down", loads) as library:
        with lease_models():
            old = library.client.get_model("a")
            write_model(tmp_path, "new", "up", "a")
            await next_look(library, mock_clock)
            assert _ask(library, "a") == "new"
            assert _ask(library, "b") == "b"
            assert library.shelf.counts() == (1, 1)
            assert (old.folder / "model.txt").read_text() == "a"
        await wait_gone(old.folder.parent, "1")


async def test_a_change_is_fetched_at_the_next_call(tmp_path: Path, mock_clock: MockClock) -> None:
    """A model that was changed is loaded anew, and one that has gone is an error whose files are removed."""
    up, loads, storage = _models(tmp_path, "a", "b"), Loads(), CountingStorage()
    async with library_over(models_in(up, 2, 2), tmp_path / "down", loads, storage) as library:
        get = library.client.get_model
        gone = get("b")
        assert get("a").text == "a"
        write_model(up, "aa", "a")
        shutil.rmtree(up / "b")
        await next_look(library, mock_clock)
        assert len(storage.fetched) == 2
        assert get("a").text == "aa"
        assert len(storage.fetched) == 3
        with pytest.raises(UserRuntimeException, match="'b' was not found"):
            get("b")
        await wait_gone(gone.folder.parent, "1")


async def test_a_cached_model_outlives_its_storage(tmp_path: Path, mock_clock: MockClock) -> None:
    """While nothing can be fetched, the old model serves; a model that is not here is an error that says why."""
    up, storage = _models(tmp_path, "a", "b"), CountingStorage()
    async with library_over(models_in(up, 2, 2), tmp_path / "down", Loads(), storage) as library:
        old = library.client.get_model("a")
        write_model(up, "aa", "a")
        await next_look(library, mock_clock)
        storage.failure = StorageFailure("the storage is away")
        assert library.client.get_model("a") is old
        with pytest.raises(UserRuntimeException, match=r"failed .* model b of version 1: the storage is away"):
            library.client.get_model("b")
        assert library.shelf.counts() == (1, 1)
        storage.failure = None
        await next_look(library, mock_clock)
        assert library.client.get_model("a").text == "aa"
        assert library.client.get_model("b").text == "b"


async def test_a_cached_model_that_fails_to_load_takes_no_place(tmp_path: Path) -> None:
    """The limits count what is there, so that failures do not push others out for ever."""
    up = _models(tmp_path, "a", "b")
    write_model(tmp_path, "broken", "up", "c")
    async with library_over(models_in(up, 2, 3), tmp_path / "down", Loads()) as library:
        for _ in range(3):
            with pytest.raises(UserRuntimeException, match="this model is broken"):
                library.client.get_model("c")
        kept = [library.client.get_model(name) for name in "ab"]
        assert [library.client.get_model(name) for name in "ab"] == kept
        assert library.shelf.counts() == (2, 3)


async def test_a_model_that_goes_while_it_is_loaded_is_given_but_not_kept(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    """Whoever asked before gets it; nothing of it is left behind."""
    up, begun, go_on = _models(tmp_path, "a"), trio.Event(), threading.Event()
    async with library_over(models_in(up, 1, 1), tmp_path / "down", Loads()) as library:

        def load_slowly(folder: str) -> str:
            trio.from_thread.run_sync(begun.set)
            assert go_on.wait(WAIT_SECONDS)
            return folder

        async def ask() -> None:
            assert (await library.client.aget_model("a")).endswith("/a/1")

        library.client.set_load_method(load_slowly)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await begun.wait()
            shutil.rmtree(up / "a")
            await library.watcher.look_now()
            go_on.set()
        assert library.shelf.counts() == (0, 0)
        await wait_gone(tmp_path, "down/*/*/a")


@settings(max_examples=examples(15), deadline=None)
@given(calls=st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=1, max_size=20))
def test_threads_that_share_a_cache_see_whole_models(
    tmp_path_factory: pytest.TempPathFactory, calls: list[list[str]]
) -> None:
    """Whatever the calls of four threads use and in what order, their models are theirs, and the limits hold after."""
    tmp_path = tmp_path_factory.mktemp("cache")
    up, answers = _models(tmp_path, *"abcd"), Counter[str]()

    async def main() -> None:
        async with library_over(models_in(up, 1, 2), tmp_path / "down", Loads()) as library:
            limiter = trio.CapacityLimiter(4)

            def call(names: list[str]) -> None:
                with lease_models():
                    models = [library.client.get_model(name) for name in names]
                    for name, model in zip(names, models, strict=True):
                        assert (model.folder / "model.txt").read_text() == model.text == name

            async def ask(names: list[str]) -> None:
                await trio.to_thread.run_sync(call, names, limiter=limiter)
                answers.update(names)

            async with trio.open_nursery() as nursery:
                for names in calls:
                    nursery.start_soon(ask, names)
            memory, disk = library.shelf.counts()
            assert memory == 1
            assert disk <= 2

    trio.run(main)
    assert answers == Counter(name for names in calls for name in names)
