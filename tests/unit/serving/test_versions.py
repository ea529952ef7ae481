from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ovmstrio.config.specs import GraphSpec, HandlerSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.handlers.kind import handler_fingerprint
from ovmstrio.serving.fingerprints import content_fingerprint, graph_fingerprint, python_files, tree_fingerprint
from ovmstrio.serving.model_versions import find_model_file, list_versions, scan_versions
from ovmstrio.serving.periodic_check import PeriodicCheck
from ovmstrio.util.backoff import Backoff


def _touch(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).touch()
    return directory


@pytest.mark.parametrize(
    ("names", "versions", "warnings"),
    [
        (["10", "9", "1"], {1: "1", 9: "9", 10: "10"}, []),
        *(
            ([name], {version: name}, [])
            for name, version in [
                ("1abc", 1),
                ("001", 1),
                ("+7", 7),
                (" 3", 3),
                ("12_3", 12),
                (str(2**63 - 1), 2**63 - 1),
            ]
        ),
        *(
            ([name, "2"], {2: "2"}, [f'directory "{name}" is not a version: expected a positive integer'])
            for name in ["0", "-1", "abc", "v1", "000", str(2**63), "9" * 200, "٣"]
        ),
        (
            ["001", "1", "1abc"],
            {1: "1"},
            [f'directory "{name}" is version 1, as is "1"; ignored' for name in ("001", "1abc")],
        ),
        (["1", "..2026_08_01", ".git"], {1: "1"}, []),
        ([], {}, ["no version directory found: expected {}/1"]),
    ],
)
def test_versions_are_directories_whose_names_begin_with_a_number(
    tmp_path: Path, names: list[str], versions: dict[int, str], warnings: list[str]
) -> None:
    for name in names:
        _touch(tmp_path / name)
    _touch(tmp_path, "4", "README.md")
    listing = scan_versions(tmp_path)
    assert list(listing.versions.items()) == [(version, tmp_path / name) for version, name in versions.items()]
    assert listing.warnings == tuple(warning.replace("{}", str(tmp_path)) for warning in warnings)


NO_MODEL = (
    ": no model found (expected model.xml with model.bin, .onnx, .pdmodel with .pdiparams, .pb or .tflite, "
    "found model.xml, readme.txt); model.xml needs model.bin in the same directory"
)


@pytest.mark.parametrize(
    ("find", "path", "message"),
    [
        (scan_versions, "nowhere", "nowhere: the model's path does not exist; create it, or correct base_path"),
        *((scan_versions, path, "cannot be read") for path in ("a\0b", "x" * 300, "\udcff\ud800")),
        (scan_versions, "models/../models", "leads through"),
        *((scan_versions, name, "expected model.xml with model.bin") for name in ("notes.txt", "a.xml", "a.pdiparams")),
        (find_model_file, "models", f"models{NO_MODEL}"),
        (find_model_file, "nowhere", "cannot be read: No such file"),
    ],
)
def test_a_path_without_a_model_is_refused(
    tmp_path: Path, find: Callable[[Path], object], path: str, message: str
) -> None:
    _touch(_touch(tmp_path, "notes.txt", "a.xml", "a.pdiparams") / "models", "model.xml", "readme.txt")
    with pytest.raises(ConfigError) as caught:
        find(tmp_path / path)
    assert message in caught.value.message


def test_a_link_to_a_directory_is_a_version(tmp_path: Path) -> None:
    real = _touch(tmp_path / "data" / "real")
    base = _touch(tmp_path / "base")
    (base / "4").symlink_to(real, target_is_directory=True)
    assert list_versions(base) == {4: base / "4"}


def test_a_link_that_cannot_be_followed_hides_no_version(tmp_path: Path) -> None:
    _touch(tmp_path / "1")
    (tmp_path / "2").symlink_to("2")
    assert list_versions(tmp_path) == {1: tmp_path / "1"}


def test_a_single_model_file_is_version_one(tmp_path: Path) -> None:
    _touch(tmp_path, "net.onnx", "net.xml", "net.bin", "p.pdmodel", "p.pdiparams")
    assert list_versions(tmp_path / "net.onnx") == {1: tmp_path / "net.onnx"}
    assert list_versions(tmp_path / "net.xml") == {1: tmp_path / "net.xml"}
    assert list_versions(tmp_path / "p.pdiparams") == {1: tmp_path / "p.pdmodel"}
    assert find_model_file(tmp_path / "net.onnx") == tmp_path / "net.onnx"


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (("model.xml", "model.bin"), "model.xml"),
        (("a.onnx", "model.xml", "model.bin"), "model.xml"),
        (("a.onnx", "model.xml"), "a.onnx"),
        (("weights.data", "a.onnx", "p.pdmodel", "p.pdiparams"), "a.onnx"),
        (("p.pdmodel", "p.pdiparams", "f.pb"), "p.pdmodel"),
        (("frozen.pb", "m.tflite"), "frozen.pb"),
        (("m.tflite", "labels.txt"), "m.tflite"),
        (("b.onnx", "a.onnx"), "a.onnx"),
        (("saved_model.pb", "a.pb"), ""),
    ],
)
def test_the_first_complete_format_is_the_model(tmp_path: Path, files: tuple[str, ...], chosen: str) -> None:
    _touch(tmp_path / "variables")
    assert find_model_file(_touch(tmp_path, *files)) == tmp_path / chosen


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_any_name_is_listed_or_skipped(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    base = tmp_path_factory.mktemp("base")
    if name not in {".", ".."}:
        _touch(base / name)
    versions = scan_versions(base).versions
    assert all(version > 0 for version in versions)
    assert len(versions) <= 1


# Marks of files


def test_equal_content_has_an_equal_mark() -> None:
    assert content_fingerprint(b"{}") == content_fingerprint(b"{}") != content_fingerprint(b"{ }")


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "model.bin").write_bytes(b"123"),
        lambda root: (root / "model.xml").touch(),
        lambda root: (root / "model.bin").unlink(),
        lambda root: _touch(root / "variables", "x"),
    ],
)
def test_any_change_below_a_directory_changes_its_mark(tmp_path: Path, change: Callable[[Path], object]) -> None:
    (tmp_path / "model.bin").write_bytes(b"12")
    before = tree_fingerprint(tmp_path)
    assert tree_fingerprint(tmp_path) == before
    change(tmp_path)
    assert tree_fingerprint(tmp_path) != before


def test_missing_paths_and_impossible_names_have_distinct_marks(tmp_path: Path) -> None:
    (mark,) = {tree_fingerprint(tmp_path / name) for name in ("model.onnx", "nowhere", "x" * 300, "a\0b")}
    (tmp_path / "model.onnx").touch()
    assert tree_fingerprint(tmp_path / "model.onnx") != mark


def test_circular_and_dangling_links_have_a_mark(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert tree_fingerprint(tmp_path) == tree_fingerprint(tmp_path)


@pytest.fixture
def without_descriptors(tmp_path: Path) -> Iterator[Path]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield tmp_path
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "examine",
    [
        tree_fingerprint,
        lambda path: list(python_files(path)),
        lambda path: graph_fingerprint(GraphSpec(name="g", base_path=path, graph_path=Path(__file__))),
        lambda path: handler_fingerprint(HandlerSpec(name="h", base_path=path, path=path)),
    ],
)
def test_a_lack_of_descriptors_is_no_change_of_files(
    without_descriptors: Path, examine: Callable[[Path], object]
) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        examine(without_descriptors)


def test_a_lack_of_descriptors_removes_no_model_without_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.onnx").touch()
    assert list(scan_versions(tmp_path).versions) == [1]

    def fail(path: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(ConfigError, match="cannot be read: Too many open files"):
        scan_versions(tmp_path)


# Files of graphs


def _graph_spec(root: Path, *handlers: str) -> GraphSpec:
    path = root / "graph.pbtxt"
    path.write_text("".join(f"handler_path: {handler}\n" for handler in handlers))
    return GraphSpec(name="g", base_path=root, graph_path=path)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_python_file_next_to_a_handler_is_in_the_mark(tmp_path: Path) -> None:
    spec = _graph_spec(tmp_path, '"code/model.py"', "'more\\\\other.py'")
    seen = {graph_fingerprint(spec)}
    for count, name in enumerate(["code/model.py", "code/tool.py", "code/pkg/__init__.py", "code/pkg/deep.py"], 2):
        _write(tmp_path / name, "x")
        seen.add(graph_fingerprint(spec))
        assert len(seen) == count
    _write(tmp_path / "more/other.py", "x")
    assert graph_fingerprint(spec) not in seen
    seen.add(graph_fingerprint(spec))
    for name in ("code/notes.txt", "code/data/x.py", "code/__pycache__/model.pyc", "elsewhere.py"):
        _write(tmp_path / name, "x")
    assert graph_fingerprint(spec) in seen
    _write(tmp_path / "code/model.py", "longer")
    assert graph_fingerprint(spec) not in seen


def test_the_content_of_the_graph_file_is_in_the_mark(tmp_path: Path) -> None:
    spec = _graph_spec(tmp_path, '"a.py"')
    first = graph_fingerprint(spec)
    spec.graph_path.write_bytes(spec.graph_path.read_bytes())
    assert graph_fingerprint(spec) == first
    spec.graph_path.write_text("# changed")
    second = graph_fingerprint(spec)
    spec.graph_path.unlink()
    assert len({first, second, graph_fingerprint(spec)}) == 3


def test_entries_that_cannot_be_looked_up_are_no_packages(tmp_path: Path) -> None:
    (tmp_path / "overlong").symlink_to("x" * 300)
    (tmp_path / "handler.py").touch()
    assert list(python_files(tmp_path)) == [tmp_path / "handler.py"]


# The watcher


class _Looks:
    def __init__(self) -> None:
        self.begun: list[float] = []
        self.is_complete = True

    async def __call__(self) -> bool:
        self.begun.append(trio.current_time())
        await trio.sleep(1)
        return self.is_complete


async def test_pauses_grow_while_looks_fail(autojump_clock: MockClock) -> None:
    finished_checks = _Looks()
    begin = trio.current_time()
    watcher = PeriodicCheck(finished_checks, 10, Backoff(1, 3))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        await watcher.wait_check()
        finished_checks.is_complete = False
        while watcher.finished_checks < 5:
            await watcher.wait_check()
        finished_checks.is_complete = True
        await watcher.wait_check()
        finished_checks.is_complete = False
        await watcher.wait_check()
        await watcher.wait_check()
        nursery.cancel_scope.cancel()
    assert [time - begin for time in finished_checks.begun] == [0, 11, 13, 16, 20, 24, 35, 37]


async def test_pauses_are_constant_without_a_backoff(autojump_clock: MockClock) -> None:
    finished_checks = _Looks()
    finished_checks.is_complete = False
    begin = trio.current_time()
    with trio.move_on_after(11):
        await PeriodicCheck(finished_checks, 2).run(pauses_first=True)
    assert [time - begin for time in finished_checks.begun] == [2, 5, 8]


async def test_a_requested_poll_begins_at_once_and_is_shared(autojump_clock: MockClock) -> None:
    finished_checks = _Looks()
    begin = trio.current_time()
    watcher = PeriodicCheck(finished_checks, 100)
    ended: list[float] = []

    async def request(seconds: float) -> None:
        await trio.sleep(seconds)
        await watcher.check_now()
        ended.append(trio.current_time() - begin)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        async with trio.open_nursery() as callers:
            for seconds in (5, 5, 5.5):
                callers.start_soon(request, seconds)
        nursery.cancel_scope.cancel()
    assert [time - begin for time in finished_checks.begun] == [0, 5, 6]
    assert ended == [6, 6, 7]


async def test_an_error_of_a_look_ends_the_watcher(mock_clock: MockClock) -> None:
    async def look() -> bool:
        await wait_all_tasks_blocked()
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="on fire"):
        await PeriodicCheck(look, 1).run()
