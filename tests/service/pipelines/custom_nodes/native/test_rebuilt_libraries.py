"""Libraries that are built again while they are in use, in this process."""

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
    """Write a build into the same file."""
    copy_of_fixture(path.parent, path.name, build)


def rename(path: Path, build: int) -> None:
    """Write a build beside the file, and rename it."""
    copy_of_fixture(path.parent, "new", build).rename(path)


def remove_first(path: Path, build: int) -> None:
    """Delete the file and write another one, as linkers do."""
    path.unlink()
    copy_of_fixture(path.parent, path.name, build)


def build_of(path: Path) -> int:
    """Load a library and ask it for its number."""
    number: int = load_library(NodeIdentity("n", path)).symbols["fixture_build"]()
    return number


def refusal(path: Path) -> str:
    """Give the message with which a library is refused."""
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem.message


def no_copies(path: Path) -> AbstractContextManager[Path]:
    """Stand in for a folder that cannot be written, which there is none of for root."""
    raise OSError(errno.EROFS, "Read-only file system", str(path))


async def open_node(path: Path, tasks: trio.Nursery) -> NativeNode:
    """Open a node that adds the number of its build."""
    return await open_native_node(path, "n", {"execute": "build"}, tasks=tasks)


@pytest.mark.parametrize("rebuild", [overwrite, rename, remove_first])
async def test_a_library_that_is_built_again_is_what_the_next_node_runs(
    tmp_path: Path, rebuild: Callable[[Path, int], None]
) -> None:
    """Calls that are under way in the old one end there, and it is deinitialized after them."""
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


def test_a_library_that_is_as_it_was_is_not_opened_again(tmp_path: Path) -> None:
    """Nodes that are opened at the same time, in several threads, have one, too."""
    path = copy_of_fixture(tmp_path)
    given = []
    ready = threading.Barrier(4)

    def load() -> None:
        ready.wait(WAIT_SECONDS)
        given.append(load_library(NodeIdentity("n", path)).symbols)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in given}) == 1
    assert load_library(NodeIdentity("n", path)).symbols is given[0]


def library_with_neighbour(folder: Path, build: int) -> Path:
    """Compile a fixture that is linked with a library below its own folder, found by ``$ORIGIN``."""
    (folder / "lib").mkdir(exist_ok=True)
    neighbour = folder / "neighbour.c"
    neighbour.write_text("int neighbour(void) { return 40; }\n")
    if not (folder / "lib/libneighbour.so").exists():
        compiled(neighbour, folder / "lib/libneighbour.so")
    source = folder / "node.c"
    source.write_text(
        f'#include "{FIXTURE_SOURCE}"\nint neighbour(void);\nint sum(void) {{ return neighbour() + BUILD; }}'
    )
    flags = (f"-L{folder / 'lib'}", "-Wl,--no-as-needed", "-lneighbour", "-Wl,-rpath,$ORIGIN/lib", f"-DBUILD={build}")
    return compiled(source, folder / "node.so", *flags)


@pytest.mark.parametrize("is_writable", [True, False])
def test_what_a_library_finds_by_its_own_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_writable: bool
) -> None:
    """Whether there can be a copy of it or not, and when it is built again."""
    if not is_writable:
        monkeypatch.setattr(native_library, "private_copy", no_copies)
    for build in (1, 2):
        path = library_with_neighbour(tmp_path, build)
        assert load_library(NodeIdentity("n", path)).symbols["sum"]() == 40 + build


def test_in_a_folder_that_cannot_be_written_a_library_that_is_renamed_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another file; one that was overwritten is not opened, for it would be the old one, and that is told."""
    monkeypatch.setattr(native_library, "private_copy", no_copies)
    path = copy_of_fixture(tmp_path, build=1)
    assert build_of(path) == 1
    for build in (2, 3):
        rename(path, build)
        assert build_of(path) == build
    os.utime(path, (1, 1))
    assert "restart the server, or write the library beside it and rename that" in refusal(path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_library_that_is_half_written_is_refused(tmp_path: Path, share: float) -> None:
    """Its end, opened all the same, would be missed by the process; the whole one is taken when it is there."""
    path = copy_of_fixture(tmp_path, build=1)
    assert build_of(path) == 1
    image = path.read_bytes()
    loaded = int.from_bytes(image[0x28:0x30], "little") // 2
    path.write_bytes(image[: int(share * loaded)])
    assert "its end is missing, as it is while the file is being written (NODE_LIBRARY_LOAD" in refusal(path)
    overwrite(path, 2)
    assert build_of(path) == 2


def test_a_library_that_changes_while_it_is_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the copy may be of both builds."""
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


def test_copies_that_crashed_processes_left_are_deleted_by_the_next_opening(tmp_path: Path) -> None:
    """One that another process is about to open is locked, and stays; so does what is no copy."""
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
