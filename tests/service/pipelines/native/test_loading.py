from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import CDLL, c_ulong, sizeof
from pathlib import Path

import numpy as np
import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.pipelines.native import library as native_library
from ovmstrio.pipelines.native.library import (
    NodeIdentity,
    NodeParam,
    NodeTensor,
    NodeTensorInfo,
    load_library,
    private_copy,
    remove_leftovers,
)
from ovmstrio.pipelines.native.node import NativeNode, open_native_node
from tests.support.native_nodes import FIXTURE_SOURCE, INCLUDE, Account, compiled, copy_of_fixture, names_in
from tests.support.pipelines import hosting
from tests.support.waits import WAIT_SECONDS, until_async

OTHER_MACHINE, OTHER_NAME = (62, "x86_64") if platform.machine() == "aarch64" else (183, "aarch64")


def refusal_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    return problem.message


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal_of(tmp_path / "none.so").endswith("No such file or directory (NODE_LIBRARY_LOAD_FAILED_OPEN)")


@pytest.mark.parametrize("content", [b"", b"\x7fEL", b"\x7fELF", b"print('no library')\n" * 10])
def test_file_without_elf_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.so"
    path.write_bytes(content)
    assert "it is not a shared library (no ELF header) (NODE_LIBRARY_LOAD_FAILED_OPEN)" in refusal_of(path)


def test_missing_functions_are_named(tmp_path: Path) -> None:
    source = tmp_path / "node.c"
    source.write_text("int initialize(void) { return 0; } int execute(void) { return 0; }")
    path = compiled(source, tmp_path / "node.so")
    with pytest.raises(ConfigError, match="NODE_LIBRARY_LOAD_FAILED_SYM") as caught:
        load_library(NodeIdentity("n", path))
    assert "deinitialize, getInputsInfo, getOutputsInfo, release missing" in str(caught.value)
    assert "custom_node_interface.h" in str(caught.value)


def library_that_lacks(tmp_path: Path, declaration: str, call: str) -> Path:
    source = tmp_path / "node.c"
    source.write_text(f'#include "{FIXTURE_SOURCE}"\n{declaration};\nvoid never(void) {{ {call}; }}\n')
    return compiled(source, tmp_path / "node.so", "-Wl,-z,lazy")


def test_undefined_symbol_is_refused_with_its_place(tmp_path: Path) -> None:
    path = library_that_lacks(tmp_path, "void found_nowhere(void)", "found_nowhere()")
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert problem.file == str(path)
    assert f"node.so uses found_nowhere ({tmp_path / 'node.c'}:2), but none of its linked libraries" in problem.message
    assert problem.message.endswith("(NODE_LIBRARY_LOAD_FAILED_OPEN)")
    assert "link it with the file or library that defines it" in problem.suggestion


def test_source_that_defines_a_missing_symbol_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "more.c").write_text("#include <math.h>\nint half(int value)\n{\n    return value / 2;\n}\n")
    path = library_that_lacks(tmp_path, "int half(int)", "half(3)")
    with pytest.raises(ConfigError) as caught:
        load_library(NodeIdentity("n", path))
    (problem,) = caught.value.problems
    assert f"uses half, which is defined in {tmp_path / 'more.c'}:2," in problem.message
    assert problem.suggestion.startswith("link it with more.c;")


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_symbols_of_c_plus_plus_are_demangled(tmp_path: Path) -> None:
    source = tmp_path / "node.cpp"
    source.write_text("namespace far { int away(int, float); }\nint here() { return far::away(1, 2); }\n")
    path = compiled(source, tmp_path / "node.so", "-x", "c++")
    message = refusal_of(path)
    assert f"uses far::away(int, float) ({source}:1)" in message


@pytest.mark.parametrize("language", ["c", "c++"])
def test_header_has_the_layout_of_the_interface(tmp_path: Path, language: str) -> None:
    structs = {"CustomNodeTensor": NodeTensor, "CustomNodeTensorInfo": NodeTensorInfo, "CustomNodeParam": NodeParam}
    names = {"data_bytes": "dataBytes", "dims_count": "dimsCount"}
    layout = {"sizeof(enum CustomNodeTensorPrecision)": 4, "UNSPECIFIED": 0, "FP32": 1, "U8": 3, "I32": 7, "I64": 9}
    for name, struct in structs.items():
        layout[f"sizeof(struct {name})"] = sizeof(struct)
        for field, *_ in struct._fields_:
            layout[f"offsetof(struct {name}, {names.get(field, field)})"] = getattr(struct, field).offset
    source = tmp_path / "layout.c"
    includes = '#include <stddef.h>\n#include "custom_node_interface.h"\n'
    source.write_text(f"{includes}unsigned long layout[] = {{{', '.join(layout)}}};\n")
    library = compiled(source, tmp_path / "layout.so", "-x", language, "-Wall", "-Wextra", "-Werror")
    found = (c_ulong * len(layout)).in_dll(CDLL(str(library)), "layout")
    assert dict(zip(layout, found, strict=True)) == layout
    assert [sizeof(struct) for struct in structs.values()] == [48, 32, 16]


def test_header_is_in_the_package_and_under_protos() -> None:
    header = INCLUDE / "custom_node_interface.h"
    assert (Path(__file__).parents[4] / "protos" / header.name).samefile(header)


@pytest.mark.parametrize(
    ("offset", "byte", "text"),
    [
        pytest.param(4, 1, "not 64-bit little-endian", id="32 bits"),
        pytest.param(16, 2, "link it with -shared", id="program"),
        pytest.param(
            18,
            OTHER_MACHINE,
            f"it is built for {OTHER_NAME}, but this machine is {platform.machine()} (NODE_LIB",
            id="other machine",
        ),
    ],
)
def test_library_for_other_systems_is_refused(tmp_path: Path, offset: int, byte: int, text: str) -> None:
    path = copy_of_fixture(tmp_path)
    image = bytearray(path.read_bytes())
    image[offset] = byte
    path.write_bytes(image)
    assert text in refusal_of(path)


# Rebuilt libraries

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
    assert "restart the server, or write the library to a new file and rename it" in refusal_of(path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_incomplete_library_is_refused(tmp_path: Path, share: float) -> None:
    path = copy_of_fixture(tmp_path, build=1)
    assert build_of(path) == 1
    image = path.read_bytes()
    loaded = int.from_bytes(image[0x28:0x30], "little") // 2
    path.write_bytes(image[: int(share * loaded)])
    assert "the file is truncated, or still being written (NODE_LIBRARY_LOAD" in refusal_of(path)
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
        assert "the file is still being written" in refusal_of(path)
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
