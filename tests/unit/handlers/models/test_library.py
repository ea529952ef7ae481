from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from cortex_internal.lib.exceptions import UserRuntimeException
from ovmstrio.core.errors import StorageFailure
from ovmstrio.runtimes.handlers.config.project_spec import DEFAULT_MODEL
from ovmstrio.runtimes.handlers.models.leases import lease_models
from ovmstrio.runtimes.handlers.models.tree import VersionFiles
from tests.support.model_projects import (
    CountingStorage,
    Loads,
    Model,
    library_over,
    models_in,
    next_look,
    one_model,
    several_models,
    wait_gone,
    write_model,
)


async def test_the_only_model_needs_no_name(tmp_path: Path, mock_clock: MockClock) -> None:
    """Versions 9 and 10 come by number or as the latest, None and nothing mean that too, and names do not count."""
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
    """A name that is missing or unknown is told together with those that there are."""
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
        assert library.client.metadata["my-model"]["versions"] == ["3"]


async def test_what_changes_in_the_folder_is_there_after_the_next_look(tmp_path: Path, mock_clock: MockClock) -> None:
    """Models and versions come and go; files that are written or renamed in place are loaded again."""
    up, loads = tmp_path / "up", Loads()
    write_model(up, "a1", "a", "1")
    write_model(up, "b", "b")
    async with library_over(models_in(up), tmp_path / "down", loads) as library:
        get = library.client.get_model
        old = get("a")
        gone = weakref.ref(get("b"))
        write_model(up, "a2", "a", "2")
        write_model(up, "c", "c")
        shutil.rmtree(up / "b")
        await next_look(library, mock_clock)
        assert [get("a").text, get("a", 1), get("c").text] == ["a2", old, "c"]
        gc.collect()
        assert gone() is None
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


async def test_info_lists_the_highest_version_first(tmp_path: Path, mock_clock: MockClock) -> None:
    """Timestamps are whole seconds and stand where their versions do, right after a reload too."""
    up = tmp_path / "up"
    for version in ("9", "10"):
        write_model(up, "x", "m", version)
    async with library_over(models_in(up), tmp_path / "down", Loads()) as library:
        described = library.client.metadata["m"]
        assert described["versions"] == ["10", "9"]
        assert described["timestamps"][0] == int((up / "m/10/model.txt").stat().st_mtime)
        write_model(up, "x", "m", "11")
        await next_look(library, mock_clock)
        assert library.client.metadata["m"]["versions"] == ["11", "10", "9"]


async def test_a_new_version_that_cannot_be_loaded_keeps_the_old_one(tmp_path: Path, mock_clock: MockClock) -> None:
    """Whether it is changed in place or added: it is tried once for each change, and works when it is mended."""
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


async def test_files_that_cannot_be_a_model_do_not_replace_one(tmp_path: Path, mock_clock: MockClock) -> None:
    """What was valid stays as it was, and what never was is not there."""

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


async def test_a_storage_that_fails_is_tried_again_while_models_serve(tmp_path: Path, mock_clock: MockClock) -> None:
    """Retries come after 1, 2, 4... seconds; meanwhile what is served counts as stale."""
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
    """Nothing is served before everything is there, and then it is complete."""
    storage = CountingStorage()
    storage.failure = StorageFailure("the storage is away")
    write_model(tmp_path, "a", "up", "m")

    async def mend() -> None:
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked(0.05)
        storage.failure = None
        mock_clock.jump(1000)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(mend)
        async with library_over(models_in(tmp_path / "up"), tmp_path / "down", Loads(), storage) as library:
            assert library.client.get_model("m").text == "a"


async def test_one_storage_that_fails_does_not_hold_up_the_others(tmp_path: Path, mock_clock: MockClock) -> None:
    """Versions of the models whose place cannot be read stay; those of others change."""
    first, second = write_model(tmp_path, "a", "first"), write_model(tmp_path, "b", "second")
    spec = several_models({"first": first, "second": second})
    async with library_over(spec, tmp_path / "down", Loads()) as library:
        first.chmod(0)
        try:
            (first / "model.txt").read_text()
        except PermissionError:
            write_model(tmp_path, "c", "second")
            await next_look(library, mock_clock)
            assert library.is_stale
            assert library.client.get_model("first").text == "a"
            assert library.client.get_model("second").text == "c"
        finally:
            first.chmod(0o700)


async def test_concurrent_first_calls_load_once(tmp_path: Path) -> None:
    """A hundred threads get the same object."""
    write_model(tmp_path, "a", "up", "m")
    loads, got = Loads(), list[Model]()
    async with library_over(models_in(tmp_path / "up"), tmp_path / "down", loads) as library:

        async def ask() -> None:
            got.append(await trio.to_thread.run_sync(library.client.get_model, "m", limiter=limiter))

        limiter = trio.CapacityLimiter(100)
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(ask)
        assert len(got) == 100
        assert len(set(map(id, got))) == len(loads.folders) == 1
        assert await library.client.aget_model("m") is got[0]


async def test_the_files_of_a_call_stay_until_it_ends(tmp_path: Path, mock_clock: MockClock) -> None:
    """A model that was changed or has gone keeps its files for the calls that asked for it before."""
    up = tmp_path / "up"
    write_model(up, "a", "m")
    async with library_over(models_in(up), tmp_path / "down", Loads()) as library:
        with lease_models():
            model = library.client.get_model("m")
            shutil.rmtree(up / "m")
            await next_look(library, mock_clock)
            assert (model.folder / "model.txt").read_text() == "a"
        await wait_gone(model.folder.parent, "1")


async def test_async_handlers_wait_for_a_model_on_the_loop(tmp_path: Path) -> None:
    """A model that has to be loaded is loaded in a thread; errors are the same."""
    write_model(tmp_path, "a", "up", "m")
    async with library_over(models_in(tmp_path / "up"), tmp_path / "down", Loads()) as library:
        assert (await library.client.aget_model("m")).text == "a"
        with pytest.raises(UserRuntimeException, match="wasn't found"):
            await library.client.aget_model("m", 7)


async def test_a_handler_without_a_load_method_is_told(tmp_path: Path) -> None:
    """The message names the method that is missing, and setting it helps."""
    write_model(tmp_path, "a", "up")
    async with library_over(one_model(tmp_path / "up"), tmp_path / "down", Loads()) as library:
        library.loader.load_model = None
        with pytest.raises(UserRuntimeException, match="no method load_model"):
            library.client.get_model(model_version=1)
        library.client.set_load_method(lambda path: path)
        assert library.client.get_model(model_version=1).endswith("/_cortex_default/1")


async def test_only_the_latest_versions_are_there(tmp_path: Path, mock_clock: MockClock) -> None:
    """What serves stays until a higher version has been loaded, and what leaves makes room for others."""
    for version in (1, 2, 3):
        write_model(tmp_path, f"v{version}", "up", str(version))
    spec = one_model(tmp_path / "up").model_copy(update={"latest_versions": 1})
    storage = CountingStorage()
    async with library_over(spec, tmp_path / "down", Loads(), storage) as library:

        async def look() -> tuple[str, list[str]]:
            await next_look(library, mock_clock)
            model = await trio.to_thread.run_sync(library.client.get_model)
            return model.text, library.shelf.metadata()[DEFAULT_MODEL]["versions"]

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
