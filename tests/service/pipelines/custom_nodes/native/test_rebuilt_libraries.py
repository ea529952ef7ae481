from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.pipelines.custom_nodes.native import native_library
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_failures import NodeIdentity
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_library import load_library
from ovmstrio.runtimes.pipelines.custom_nodes.native.native_node import NativeNode, open_native_node
from ovmstrio.runtimes.pipelines.custom_nodes.native.private_copy import private_copy, remove_leftovers
from tests.support.native_nodes import FIXTURE_SOURCE, Account, compiled, copy_of_fixture, names_in
from tests.support.tasks import hosting
from tests.support.waits import WAIT_SECONDS, until_async

X = np.ones((1, 3), np.float32)
WAITING = -X


def overwrite(path: Path, build: int) -> None:
    copy_of_fixture(path.parent, path.name, build)


def rename(path: Path, build: int) -> None:
    copy_of_fixture(path.parent, "new", build).rename(path)


def remove_first(path: Path, build: int) -> None:
    path.unlink()
    copy_of_fixture(path.parent, path.name, build)


def build_of(path: Path) -> int:
    number: int = load_library(NodeIdentity("n", path)).symbols["fixture_build"]()
    return number


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem.message


def no_copies(path: Path) -> AbstractContextManager[Path]:
    """Stand in for a folder that cannot be written, which there is none of for root."""
    raise OSError(errno.EROFS, "Read-only file system", str(path))


async def open_node(path: Path, tasks: trio.Nursery) -> NativeNode:
    return await open_native_node(path, "n", {"execute": "build"}, tasks=tasks)


@pytest.mark.parametrize("rebuild", [overwrite, rename, remove_first])
async def test_next_node_runs_the_rebuilt_library(tmp_path: Path, rebuild: Callable[[Path, int], None]) -> None:
    path = copy_of_fixture(tmp_path, build=1)
    answers = []

    async def wait_in(node: NativeNode) -> None:
        answers.append((await node.execute({"x": WAITING}))["y"].tolist())

    async with hosting() as tasks:
        old = await open_node(path, tasks)
        account = Account(path)
        async with trio.open_nursery() as calls:
            calls.start_soon(wait_in, old)
            await until_async(lambda: account.count("waiting") == 1)
            rebuild(path, 2)
            new = await open_node(path, tasks)
            assert (await new.execute({"x": X}))["y"].tolist() == [[3, 3, 3]]
            assert (await old.execute({"x": X}))["y"].tolist() == [[2, 2, 2]]
            account.open()
        await old.aclose()
        assert answers == [[[0, 0, 0]]]
        assert account.count("deinitialized") == 1
        account.check()
        assert (await new.execute({"x": X}))["y"].tolist() == [[3, 3, 3]]
        await new.aclose()
    assert names_in(tmp_path) == [path.name]


def test_unchanged_library_is_opened_once(tmp_path: Path) -> None:
    path = copy_of_fixture(tmp_path)
    loaded = []
    ready = threading.Barrier(4)

    def load() -> None:
        ready.wait(WAIT_SECONDS)
        loaded.append(load_library(NodeIdentity("n", path)).symbols)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in loaded}) == 1
    assert load_library(NodeIdentity("m", tmp_path / "x" / ".." / path.name)).symbols is loaded[0]
    assert load_library(NodeIdentity("n", copy_of_fixture(tmp_path, "other.so"))).symbols is not loaded[0]


def library_with_dependency(folder: Path, build: int) -> Path:
    (folder / "lib").mkdir(exist_ok=True)
    dependency = folder / "dependency.c"
    dependency.write_text("int dependency(void) { return 40; }\n")
    if not (folder / "lib/libneighbour.so").exists():
        compiled(dependency, folder / "lib/libneighbour.so")
    source = folder / "node.c"
    source.write_text(
        f'#include "{FIXTURE_SOURCE}"\nint dependency(void);\nint sum(void) {{ return dependency() + BUILD; }}'
    )
    flags = (f"-L{folder / 'lib'}", "-Wl,--no-as-needed", "-lneighbour", "-Wl,-rpath,$ORIGIN/lib", f"-DBUILD={build}")
    return compiled(source, folder / "node.so", *flags)


@pytest.mark.parametrize("is_writable", [True, False])
def test_library_finds_others_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_writable: bool
) -> None:
    if not is_writable:
        monkeypatch.setattr(native_library, "private_copy", no_copies)
    for build in (1, 2):
        path = library_with_dependency(tmp_path, build)
        assert load_library(NodeIdentity("n", path)).symbols["sum"]() == 40 + build


def test_renamed_library_in_a_read_only_folder_is_loaded_and_overwritten_one_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "private_copy", no_copies)
    path = copy_of_fixture(tmp_path, build=1)
    assert build_of(path) == 1
    for build in (2, 3):
        rename(path, build)
        assert build_of(path) == build
    os.utime(path, (1, 1))
    assert "restart the server, or write the library beside it and rename that" in refusal(path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_incomplete_library_is_refused(tmp_path: Path, share: float) -> None:
    path = copy_of_fixture(tmp_path, build=1)
    assert build_of(path) == 1
    image = path.read_bytes()
    loaded = int.from_bytes(image[0x28:0x30], "little") // 2
    path.write_bytes(image[: int(share * loaded)])
    assert "its end is missing, as it is while the file is being written (NODE_LIBRARY_LOAD" in refusal(path)
    overwrite(path, 2)
    assert build_of(path) == 2


def test_library_that_changes_while_it_is_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy_of_fixture(tmp_path, build=1)

    @contextmanager
    def slow_copy(source: Path) -> Iterator[Path]:
        with private_copy(source) as copy:
            rename(source, 2)
            yield copy

    with monkeypatch.context() as patch:
        patch.setattr(native_library, "private_copy", slow_copy)
        assert "it is being written" in refusal(path)
    assert build_of(path) == 2


def test_copies_of_crashed_processes_are_deleted(tmp_path: Path) -> None:
    path = copy_of_fixture(tmp_path)
    with private_copy(path) as leftover:
        left = leftover.with_name(f".{path.name}.left{leftover.suffix}")
        left.write_bytes(b"x")
        held = leftover.with_name(f".{path.name}.held{leftover.suffix}")
        held.write_bytes(b"x")
    hidden = tmp_path / ".hidden"
    hidden.touch()
    with held.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        build_of(path)
        assert sorted(tmp_path.iterdir()) == sorted([path, held, hidden])
    remove_leftovers(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, hidden])
