from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.errors import Overloaded, StorageFailure, UserCodeError
from ovmstrio.handlers.config.project_spec import DEFAULT_MODEL
from ovmstrio.handlers.handler_loading import HandlerDependencies, LoadedHandler, open_handler
from ovmstrio.handlers.models.client import MAX_WAITING, StorageThreads
from ovmstrio.handlers.models.library import LibraryOptions, ModelLibrary, ProjectModels, open_models
from ovmstrio.handlers.models.model_cache import lease_models
from ovmstrio.handlers.models.storage import Copy, CopyMaker
from ovmstrio.handlers.models.version_index import ModelKey, VersionFiles
from ovmstrio.stores.storage import StoredFile
from tests.support.examples import examples
from tests.support.model_projects import (
    TEXT_MODELS,
    CountingStorage,
    Loads,
    Model,
    library_over,
    models_in,
    next_look,
    one_model,
    paths_below,
    several_models,
    wait_removed,
    write_model,
)
from tests.support.pipelines import gather
from tests.support.projects import make_project
from tests.support.waits import WAIT_SECONDS, until_async


async def test_the_only_model_needs_no_name(tmp_path: Path, mock_clock: MockClock) -> None:
    write_model(tmp_path, "nine", "up", "9")
    write_model(tmp_path, "ten", "up", "10")
    loads = Loads()
    async with library_over(one_model(tmp_path / "up"), tmp_path / "down", loads) as library:
        get = library.client.get_model
        assert loads.folders == []
        assert [get().text, get(None, None).text, get("any", "").text, get(model_version="latest").text] == ["ten"] * 4
        assert [get(model_version="9").text, get(model_version=9).text] == ["nine"] * 2
        assert get() is get()
        assert [folder.parts[-1] for folder in loads.folders] == ["10", "9"]
        assert all(folder.is_absolute() for folder in loads.folders)
        assert library.client.caching is False
        for version in ("abc", "-1", "1.0", True):
            with pytest.raises(UserRuntimeException, match="is invalid"):
                get(model_version=version)
        with pytest.raises(UserRuntimeException, match=r"^error: model _cortex_default of version 4 wasn't found: run"):
            get(model_version=4)
    assert list((tmp_path / "down").iterdir()) == []


async def test_listed_models_go_by_their_names(tmp_path: Path, mock_clock: MockClock) -> None:
    write_model(tmp_path, "a", "text")
    write_model(tmp_path, "b", "text-gen", "3")
    spec = several_models({"text": tmp_path / "text", "my-model": f"file://{tmp_path}/text-gen"})
    async with library_over(spec, tmp_path / "down", Loads()) as library:
        assert library.client.get_model("text").text == "a"
        assert library.client.get_model("text", "1").text == "a"
        assert library.client.get_model("my-model").text == "b"
        with pytest.raises(UserRuntimeException, match="one of the following: my-model, text"):
            library.client.get_model()
        with pytest.raises(UserRuntimeException, match=r"'text-gen' was not found.*my-model, text"):
            library.client.get_model("text-gen")
        assert list(library.client.metadata) == ["my-model", "text"]
        modified = (tmp_path / "text-gen/3/model.txt").stat().st_mtime
        assert library.client.metadata["my-model"] == {"versions": ["3"], "timestamps": [int(modified)]}


async def test_changes_of_the_folder_are_served_after_the_next_look(tmp_path: Path, mock_clock: MockClock) -> None:
    up, loads = tmp_path / "up", Loads()
    write_model(up, "a1", "a", "1")
    write_model(up, "b", "b")
    async with library_over(models_in(up), tmp_path / "down", loads) as library:
        get = library.client.get_model
        old = get("a")
        removed = weakref.ref(get("b"))
        write_model(up, "a2", "a", "2")
        write_model(up, "c", "c")
        shutil.rmtree(up / "b")
        await next_look(library, mock_clock)
        assert [get("a").text, get("a", 1), get("c").text] == ["a2", old, "c"]
        gc.collect()
        assert removed() is None
        with pytest.raises(UserRuntimeException, match="'b' was not found"):
            get("b")
        write_model(up, "xx", "a", "1")
        shutil.rmtree(up / "a" / "2")
        await next_look(library, mock_clock)
        assert get("a").text == "xx"
        with pytest.raises(UserRuntimeException, match="a of version 2 wasn't found"):
            get("a", 2)
        assert loads.versions == ["a/1", "b/1", "a/2", "c/1", "a/1"]
        assert sorted(library.client.metadata) == ["a", "c"]
        (up / "c" / "model.txt").rename(up / "c" / "renamed.txt")
        await next_look(library, mock_clock)
        assert get("c").text == "c", "the old one serves on, because the new one cannot be loaded"
        (up / "c" / "renamed.txt").rename(up / "c" / "model.txt")
        await next_look(library, mock_clock)
        assert get("c").text == "c"
        assert loads.versions[5:] == ["c/1"], "the old one is the same as the new one again"


async def test_a_new_version_that_cannot_be_loaded_keeps_the_old_one(tmp_path: Path, mock_clock: MockClock) -> None:
    up, loads = tmp_path / "up", Loads()
    write_model(up, "good", "m", "1")
    async with library_over(models_in(up), tmp_path / "down", loads) as library:
        get = library.client.get_model
        good = get("m")
        write_model(up, "broken", "m", "1")
        write_model(up, "broken too", "m", "2")
        await next_look(library, mock_clock)
        assert [get("m"), get("m"), get("m", 1), get("m", 1)] == [good] * 4
        assert good.folder.is_dir()
        assert loads.versions == ["m/1", "m/2", "m/1"]
        with pytest.raises(UserRuntimeException, match="loading model m of version 2: this model is broken: runtime"):
            get("m", 2)
        write_model(up, "better", "m", "2")
        await next_look(library, mock_clock)
        assert get("m").text == "better"


async def test_invalid_files_do_not_replace_a_model(tmp_path: Path, mock_clock: MockClock) -> None:
    def validate(version: VersionFiles) -> str | None:
        return None if "model.txt" in version.paths else "it needs model.txt"

    up = tmp_path / "up"
    write_model(up, "good", "m", "1")
    (write_model(up, "x", "n") / "model.txt").rename(up / "n" / "other.txt")
    async with library_over(models_in(up), tmp_path / "down", Loads(), validate=validate) as library:
        assert list(library.client.metadata) == ["m"]
        (up / "m/1/model.txt").rename(up / "m/1/other.txt")
        await next_look(library, mock_clock)
        assert library.client.get_model("m").text == "good"


async def test_a_failing_storage_is_retried_while_models_serve(tmp_path: Path, mock_clock: MockClock) -> None:
    up, storage = tmp_path / "up", CountingStorage()
    write_model(up, "a", "m")
    async with library_over(models_in(up), tmp_path / "down", Loads(), storage) as library:
        states = [library.is_stale]
        storage.failure = StorageFailure("the storage is away")
        await next_look(library, mock_clock, 10)
        for seconds in (1, 2, 4, 8, 16):
            await next_look(library, mock_clock, seconds)
            states.append(library.is_stale)
            assert library.client.get_model("m").text == "a"
        write_model(up, "b", "m")
        storage.failure = None
        await next_look(library, mock_clock, 32)
        assert [*states, library.is_stale] == [False, *[True] * 5, False]
        assert library.client.get_model("m").text == "b"
    assert storage.closed == 1


async def test_the_first_look_is_repeated_until_it_works(tmp_path: Path, mock_clock: MockClock) -> None:
    storage = CountingStorage()
    storage.failure = StorageFailure("the storage is away")
    write_model(tmp_path, "a", "up", "m")

    async def restore() -> None:
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked(0.05)
        storage.failure = None
        mock_clock.jump(1000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(restore)
        async with library_over(models_in(tmp_path / "up"), tmp_path / "down", Loads(), storage) as library:
            assert library.client.get_model("m").text == "a"


async def test_a_failing_storage_does_not_delay_others(
    tmp_path: Path, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = several_models({name: write_model(tmp_path, name, name) for name in ("first", "second")})
    storage = CountingStorage()
    list_files = storage.list_files

    def fail_for_first(location: str) -> list[StoredFile]:
        if location.endswith("first"):
            raise StorageFailure("the storage is away")
        return list_files(location)

    async with library_over(spec, tmp_path / "down", Loads(), storage) as library:
        monkeypatch.setattr(storage, "list_files", fail_for_first)
        write_model(tmp_path, "newer", "second")
        await next_look(library, mock_clock)
        assert library.is_stale
        assert [library.client.get_model(name).text for name in ("first", "second")] == ["first", "newer"]


async def test_concurrent_first_calls_load_once(tmp_path: Path) -> None:
    write_model(tmp_path, "a", "up", "m")
    loads, limiter = Loads(), trio.CapacityLimiter(100)
    async with library_over(models_in(tmp_path / "up"), tmp_path / "down", loads) as library:
        get = partial(trio.to_thread.run_sync, library.client.get_model, limiter=limiter)
        models = await gather(get, ["m"] * 100)
        assert len({id(model) for model in models}) == len(loads.folders) == 1
        assert await library.client.aget_model("m") is models[0]


async def test_the_files_of_a_call_stay_until_it_ends(tmp_path: Path, mock_clock: MockClock) -> None:
    up = tmp_path / "up"
    write_model(up, "a", "m")
    async with library_over(models_in(up), tmp_path / "down", Loads()) as library:
        with lease_models():
            model = library.client.get_model("m")
            shutil.rmtree(up / "m")
            await next_look(library, mock_clock)
            assert (model.folder / "model.txt").read_text() == "a"
        await wait_removed(model.folder.parent, "1")


async def test_a_handler_needs_a_load_method(tmp_path: Path) -> None:
    write_model(tmp_path, "a", "up")
    async with library_over(one_model(tmp_path / "up"), tmp_path / "down", Loads()) as library:
        library.loader.load_model = None
        with pytest.raises(UserRuntimeException, match="no method load_model"):
            library.client.get_model(model_version=1)
        library.client.set_load_method(lambda path: path)
        assert library.client.get_model(model_version=1).endswith("/_cortex_default/1")


async def test_only_the_latest_versions_are_served(tmp_path: Path, mock_clock: MockClock) -> None:
    for version in (1, 2, 3):
        write_model(tmp_path, f"v{version}", "up", str(version))
    spec = one_model(tmp_path / "up").model_copy(update={"latest_versions": 1})
    storage = CountingStorage()
    async with library_over(spec, tmp_path / "down", Loads(), storage) as library:

        async def look() -> tuple[str, list[str]]:
            await next_look(library, mock_clock)
            model = await trio.to_thread.run_sync(library.client.get_model)
            return model.text, library.cache.metadata()[DEFAULT_MODEL]["versions"]

        assert await look() == ("v3", ["3"])
        assert [Path(location).parent.name for location in storage.fetched] == ["3"]
        with pytest.raises(UserRuntimeException, match="version 2 wasn't found"):
            library.client.get_model(model_version=2)
        write_model(tmp_path, "broken", "up", "4")
        assert await look() == ("v3", ["4", "3"])
        assert await look() == ("v3", ["4", "3"])
        write_model(tmp_path, "v4", "up", "4")
        assert await look() == ("v4", ["4", "3"])
        assert await look() == ("v4", ["4"])
        shutil.rmtree(tmp_path / "up" / "4")
        assert await look() == ("v3", ["3"])


# Cached models


def _models(root: Path, *names: str) -> Path:
    for name in names:
        write_model(root, name, "up", name)
    return root / "up"


def _call(library: ModelLibrary, name: str) -> str:
    """Use a model as a call of a handler does."""
    with lease_models():
        model: Model = library.client.get_model(name)
        assert (model.folder / "model.txt").read_text() == model.text
        return model.text


async def test_limits_hold_after_every_call(tmp_path: Path) -> None:
    up, loads, storage = _models(tmp_path, "a", "b", "c", "d"), Loads(), CountingStorage()
    async with library_over(models_in(up, 1, 2), tmp_path / "down", loads, storage) as library:
        assert library.client.caching is True
        assert storage.fetched == []
        for name in "aabacda":
            assert await trio.to_thread.run_sync(_call, library, name) == name
            memory, disk = library.cache.counts()
            assert memory == 1
            assert disk <= 2
            assert len(paths_below(tmp_path / "down", "*/*/*/1")) >= disk
        assert loads.versions == ["a/1", "b/1", "a/1", "c/1", "d/1", "a/1"]
        assert [Path(location).parts[-2] for location in storage.fetched] == ["a", "b", "c", "d", "a"]
        assert sorted(library.client.metadata) == ["a", "b", "c", "d"]


async def test_models_in_use_are_not_evicted(tmp_path: Path) -> None:
    up, loads = _models(tmp_path, "a", "b"), Loads()
    async with library_over(models_in(up, 1, 1), tmp_path / "down", loads) as library:
        with lease_models():
            first = library.client.get_model("a")
            with lease_models():
                second = library.client.get_model("b")
                assert library.client.get_model("b") is second
                assert library.cache.counts() == (2, 2)
                assert first.folder.is_dir()
            assert library.client.get_model("a") is first
            assert library.cache.counts() == (1, 1)
        assert library.client.get_model("a") is first
        assert library.client.get_model("b") is not second


async def test_an_old_copy_in_use_does_not_delay_the_new_one(tmp_path: Path, mock_clock: MockClock) -> None:
    up, loads = _models(tmp_path, "a", "b"), Loads()
    async with library_over(models_in(up, 1, 1), tmp_path / "down", loads) as library:
        with lease_models():
            old = library.client.get_model("a")
            write_model(tmp_path, "new", "up", "a")
            await next_look(library, mock_clock)
            assert _call(library, "a") == "new"
            assert _call(library, "b") == "b"
            assert library.cache.counts() == (1, 1)
            assert (old.folder / "model.txt").read_text() == "a"
        await wait_removed(old.folder.parent, "1")


async def test_a_change_is_fetched_at_the_next_call(tmp_path: Path, mock_clock: MockClock) -> None:
    up, loads, storage = _models(tmp_path, "a", "b"), Loads(), CountingStorage()
    async with library_over(models_in(up, 2, 2), tmp_path / "down", loads, storage) as library:
        get = library.client.get_model
        removed = get("b")
        assert get("a").text == "a"
        write_model(up, "aa", "a")
        shutil.rmtree(up / "b")
        await next_look(library, mock_clock)
        assert len(storage.fetched) == 2
        assert get("a").text == "aa"
        assert len(storage.fetched) == 3
        with pytest.raises(UserRuntimeException, match="'b' was not found"):
            get("b")
        await wait_removed(removed.folder.parent, "1")


async def test_a_cached_model_outlives_its_storage(tmp_path: Path, mock_clock: MockClock) -> None:
    up, storage = _models(tmp_path, "a", "b"), CountingStorage()
    async with library_over(models_in(up, 2, 2), tmp_path / "down", Loads(), storage) as library:
        old = library.client.get_model("a")
        write_model(up, "aa", "a")
        await next_look(library, mock_clock)
        storage.failure = StorageFailure("the storage is away")
        assert library.client.get_model("a") is old
        with pytest.raises(UserRuntimeException, match=r"failed .* model b of version 1: the storage is away"):
            library.client.get_model("b")
        assert library.cache.counts() == (1, 1)
        storage.failure = None
        await next_look(library, mock_clock)
        assert library.client.get_model("a").text == "aa"
        assert library.client.get_model("b").text == "b"


async def test_a_failed_load_does_not_count_for_the_limits(tmp_path: Path) -> None:
    up = _models(tmp_path, "a", "b")
    write_model(tmp_path, "broken", "up", "c")
    async with library_over(models_in(up, 2, 3), tmp_path / "down", Loads()) as library:
        for _ in range(3):
            with pytest.raises(UserRuntimeException, match="this model is broken"):
                library.client.get_model("c")
        kept = [library.client.get_model(name) for name in "ab"]
        assert [library.client.get_model(name) for name in "ab"] == kept
        assert library.cache.counts() == (2, 3)


async def test_a_model_removed_during_its_load_is_returned_but_not_kept(tmp_path: Path, mock_clock: MockClock) -> None:
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
            await library.watcher.check_now()
            go_on.set()
        assert library.cache.counts() == (0, 0)
        await wait_removed(tmp_path, "down/*/*/a")


@settings(max_examples=examples(15), deadline=None)
@given(calls=st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3), min_size=1, max_size=20))
def test_threads_that_share_a_cache_have_complete_models(
    tmp_path_factory: pytest.TempPathFactory, calls: list[list[str]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("cache")
    up = _models(tmp_path, *"abcd")

    async def main() -> None:
        async with library_over(models_in(up, 1, 2), tmp_path / "down", Loads()) as library:

            def call(names: list[str]) -> list[str]:
                with lease_models():
                    models = [library.client.get_model(name) for name in names]
                    assert [(model.folder / "model.txt").read_text() for model in models] == names
                    return [model.text for model in models]

            limiter = trio.CapacityLimiter(4)
            assert await gather(lambda names: trio.to_thread.run_sync(call, names, limiter=limiter), calls) == calls
            memory, disk = library.cache.counts()
            assert memory == 1
            assert disk <= 2

    trio.run(main)


# Models in handlers


_CODE = """
from pathlib import Path
from cortex_internal.lib.exceptions import UserRuntimeException

class Handler:
    def __init__(self, config, {client}):
        self.client = {client}
        self.first = self.client.get_model("a")

    def load_model(self, model_path):
        return {{"path": model_path, "text": Path(model_path, "model.txt").read_text()}}

    def handle_post(self, payload):
        model = self.client.get_model(payload["model"], payload.get("version"))
        if "wait" in payload:
            payload["begun"].set()
            assert payload["wait"].wait(60)
        return model["text"], Path(model["path"], "model.txt").exists(), model is self.first

    async def handle_get(self, query_params):
        return (await self.client.aget_model(query_params["model"]))["text"]

    def handle_put(self, payload):
        try:
            self.client.get_model("none")
        except UserRuntimeException as error:
            return str(error)
"""


@asynccontextmanager
async def _served(
    tmp_path: Path, client: str = "model_client", **keys: Any
) -> AsyncIterator[tuple[LoadedHandler, ProjectModels]]:
    models = {"multi_model_reloading": {"dir": "up", **keys}}
    project = make_project(tmp_path, _CODE.format(client=client), threads_per_process=2, **models)
    options = LibraryOptions(root=tmp_path / "down")
    async with (
        open_models(project, options=options) as opened,
        open_handler(project, HandlerDependencies(opened.clients)) as handler,
    ):
        yield handler, opened


@pytest.mark.parametrize("client", ["model_client", "python_client"])
async def test_a_handler_gets_models_from_its_constructor_on(tmp_path: Path, client: str) -> None:
    for name in "ab":
        write_model(tmp_path, name, "up", name)
    async with _served(tmp_path, client) as (handler, opened):
        assert await handler.call("handle_post", payload={"model": "a"}) == ("a", True, True)
        assert await handler.call("handle_post", payload={"model": "b", "version": 1}) == ("b", True, False)
        assert await handler.call("handle_get", query_params={"model": "b"}) == "b"
        message = await handler.call("handle_put", payload={})
        assert message.startswith("error: model 'none' was not found: choose one of the following: a, b")
        with pytest.raises(UserCodeError):
            await handler.call("handle_post", payload={"model": "none"})
        assert opened.info()["model_metadata"]["a"]["versions"] == ["1"]


async def test_a_model_in_use_keeps_its_place_until_the_call_ends(tmp_path: Path) -> None:
    for name in "ab":
        write_model(tmp_path, name, "up", name)
    async with _served(tmp_path, cache_size=1, disk_cache_size=1) as (handler, opened):
        library = opened.library
        assert library is not None
        begun, go_on = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()
        signal = SimpleNamespace(set=lambda: token.run_sync_soon(begun.set))
        async with trio.open_nursery() as nursery:
            payload = {"model": "a", "begun": signal, "wait": go_on}
            nursery.start_soon(lambda: handler.call("handle_post", payload=payload))
            await begun.wait()
            nursery.cancel_scope.cancel()
        assert await handler.call("handle_post", payload={"model": "b"}) == ("b", True, False)
        await trio.to_thread.run_sync(shutil.rmtree, tmp_path / "up" / "a")
        await library.watcher.check_now()
        assert await trio.to_thread.run_sync(paths_below, tmp_path, "down/*/*/a")
        go_on.set()
        await wait_removed(tmp_path, "down/*/*/a")
        assert library.cache.counts() == (0, 0)


async def test_a_project_sets_the_folder_interval_and_number_of_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    monkeypatch.setenv("CORTEX_MODEL_DIR", str(tmp_path / "copies"))
    write_model(tmp_path, "one", "up", "1")
    models = {"path": str(tmp_path / "up"), "reload_interval_seconds": 2, "latest_versions": 1}
    project = make_project(tmp_path / "project", "class Handler: ...\n", multi_model_reloading=models)
    async with open_models(project) as opened:
        assert opened.library is not None
        opened.library.loader.load_model = Loads()
        model = opened.library.client.get_model()
        assert model.folder.is_relative_to(tmp_path / "copies")
        write_model(tmp_path, "two", "up", "2")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(opened.library.watcher.wait_check)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(1.9)
            await trio.testing.wait_all_tasks_blocked()
            assert opened.library.watcher.finished_checks == 1
            mock_clock.jump(0.2)
        assert opened.library.client.get_model().text == "two"
    assert list((tmp_path / "copies").iterdir()) == []


# Storages that are slow


class _StuckStorage(CountingStorage):
    """Storage that blocks the fetches of one location until the test releases them."""

    def __init__(self, stuck: str) -> None:
        super().__init__()
        self.release = threading.Event()
        self.begun = 0
        self.stuck = stuck

    def fetch(self, file: StoredFile, target: Path, moved: object) -> None:
        if self.stuck in file.location:
            self.begun += 1
            assert self.release.wait(WAIT_SECONDS)
        super().fetch(file, target, lambda _: None)


@pytest.mark.parametrize(
    ("changed", "stuck", "served"),
    [(("a", "2"), "/2/", ("latest", 1)), (("a", "1"), "/1/", ("latest",))],
    ids=["new version", "changed version"],
)
async def test_the_old_model_serves_while_the_new_one_is_fetched(
    tmp_path: Path, mock_clock: MockClock, changed: tuple[str, str], stuck: str, served: tuple[str | int, ...]
) -> None:
    write_model(tmp_path, "old", "up", "a", "1")
    storage = _StuckStorage("nothing")
    async with library_over(models_in(tmp_path / "up", 2, 2), tmp_path / "down", Loads(), storage) as library:
        assert library.client.get_model("a").text == "old"
        write_model(tmp_path, "newer", "up", *changed)
        storage.stuck = stuck
        await next_look(library, mock_clock)
        received: list[str] = []

        async def get() -> None:
            received.append((await library.client.aget_model("a")).text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(get)
            await until_async(lambda: storage.begun == 1)
            assert [library.client.get_model("a", version).text for version in served] == ["old"] * len(served)
            storage.release.set()
        assert received == ["newer"]
        assert library.client.get_model("a").text == "newer"


class _StuckMaker(CopyMaker):
    """Factory that blocks until the test releases it, and records the removed copies."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, [])
        self.release = threading.Event()
        self.begun = 0
        self.removed: list[Copy] = []

    def make(self, key: ModelKey, version: VersionFiles, moved: object = None) -> Copy:
        self.begun += 1
        assert self.release.wait(WAIT_SECONDS)
        return Copy(key, "", Path())

    def remove(self, copy: Copy) -> None:
        self.removed.append(copy)


@asynccontextmanager
async def _threads(maker: CopyMaker, count: int, seconds: float) -> AsyncIterator[StorageThreads]:
    threads = StorageThreads(maker, count, seconds)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(threads.run)
        yield threads
        nursery.cancel_scope.cancel()


async def test_callers_wait_a_limited_time_for_a_stuck_storage(tmp_path: Path) -> None:
    maker, version = _StuckMaker(tmp_path), VersionFiles(())
    async with _threads(maker, 1, 0.1) as threads:
        with pytest.raises(StorageFailure, match=r"a:1: no data from its storage for 0.1 s"):
            await trio.to_thread.run_sync(threads.fetch, ModelKey("a", "1"), version)
        with pytest.raises(StorageFailure, match=r"b:1: all storage threads stalled for 0.1 s"):
            await trio.to_thread.run_sync(threads.fetch, ModelKey("b", "1"), version)
        maker.release.set()
        await until_async(lambda: [copy.key.name for copy in maker.removed] == ["a"])
        copy = await trio.to_thread.run_sync(threads.fetch, ModelKey("c", "1"), version)
        assert copy.key.name == "c"
        assert maker.begun == 2


async def test_the_number_of_waiting_callers_is_limited(tmp_path: Path) -> None:
    maker, version = _StuckMaker(tmp_path), VersionFiles(())
    failures, refusals = list[str](), list[str]()
    limiter = trio.CapacityLimiter(MAX_WAITING + 1)
    threads: StorageThreads

    def fetch(number: int) -> None:
        try:
            threads.fetch(ModelKey("m", str(number)), version)
        except StorageFailure as error:
            failures.append(str(error))
        except Overloaded as error:
            refusals.append(str(error))

    async def fetch_in_thread(number: int) -> None:
        await trio.to_thread.run_sync(fetch, number, limiter=limiter)

    async with trio.open_nursery() as nursery:
        async with _threads(maker, 2, 30) as threads:
            for number in range(MAX_WAITING + 1):
                nursery.start_soon(fetch_in_thread, number)
            await until_async(lambda: len(refusals) == 1)
            assert f"cannot be downloaded: {MAX_WAITING} calls already wait" in refusals[0]
        maker.release.set()
    assert failures == ["the model storage is closing"] * MAX_WAITING
    with pytest.raises(StorageFailure, match="is closing"):
        threads.fetch(ModelKey("n", "1"), version)


async def test_a_call_that_waits_for_a_storage_lends_its_thread(tmp_path: Path) -> None:
    for name in "ab":
        write_model(tmp_path, name, "up", name)
    storage = _StuckStorage("/b/")
    section = {"dir": "up", "cache_size": 2, "disk_cache_size": 2}
    project = make_project(tmp_path, TEXT_MODELS, threads_per_process=1, multi_model_reloading=section)
    options = LibraryOptions(root=tmp_path / "down", open_storage=storage.open)
    results: list[str] = []

    async def call(name: str) -> None:
        results.append(await handler.call("handle_post", payload=name))

    async with (
        open_models(project, options=options) as opened,
        open_handler(project, HandlerDependencies(opened.clients)) as handler,
        trio.open_nursery() as nursery,
    ):
        with trio.fail_after(WAIT_SECONDS):
            # All but one of these calls wait for the first one to load their model.
            for _ in range(3):
                nursery.start_soon(call, "b")
            await until_async(lambda: storage.begun == 1)
            await call("a")
            assert results == ["a"]
            storage.release.set()
            await until_async(lambda: results == ["a", "b", "b", "b"])
    assert storage.fetched == [str(tmp_path / "up" / name / "model.txt") for name in "ab"]
