"""Builds, compiled models and served models that tests share."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.inference.compile import ModelFile
from tests.support import ir, model_cache
from tests.support.model_cache import cached_folder, copy_cached, sharing_compiled_models
from tests.support.served_text_models import hosts_of, on_model_loop

BUILDS: list[str] = []


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "MODEL_CACHE", tmp_path / "cache")
    BUILDS.clear()


@cached_folder()
def _write_note(folder: Path, text: str = "a", *, repeat: int = 1) -> Path:
    BUILDS.append(text)
    (folder / "below").mkdir()
    (folder / "below" / "note.txt").write_text(text * repeat)
    return folder


def _note(folder: Path) -> str:
    return (folder / "below/note.txt").read_text()


def test_a_build_is_cached_by_its_arguments(tmp_path: Path) -> None:
    first = _write_note(tmp_path / "1")
    assert [_note(first), _note(_write_note(tmp_path / "2", text="a", repeat=1)), len(BUILDS)] == ["a", "a", 1]
    assert [_note(_write_note(tmp_path / "3", "b")), _note(_write_note(tmp_path / "4", "b", repeat=2))] == ["b", "bb"]
    assert BUILDS == ["a", "b", "b"]


def test_copies_are_independent_and_keep_other_files_of_a_folder(tmp_path: Path) -> None:
    (_write_note(tmp_path / "1") / "below/note.txt").write_text("changed")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "graph.pbtxt").write_text("graph")
    assert _note(_write_note(tmp_path / "2")) == "a"
    assert sorted(each.name for each in (tmp_path / "2").iterdir()) == ["below", "graph.pbtxt"]


def test_failed_build_is_not_cached(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        copy_cached("half", fail, tmp_path / "1", {})
    copy_cached("half", lambda folder: (folder / "full").touch(), tmp_path / "2", {})
    assert [each.name for each in (tmp_path / "2").iterdir()] == ["full"]


def test_concurrent_callers_share_a_build(tmp_path: Path) -> None:
    threads = [threading.Thread(target=_write_note, args=(tmp_path / str(number), "c")) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert BUILDS == ["c"]
    assert all(_note(tmp_path / str(number)) == "c" for number in range(4))


def test_equal_models_of_fixed_shapes_are_compiled_once(tmp_path: Path) -> None:
    compiled: list[str] = []

    def compile_(model: ov.Model, source: ModelFile, config: Mapping[str, str]) -> Any:
        compiled.append(source.spec.name)
        return object()

    share = sharing_compiled_models(compile_)

    def load(name: str, model: ov.Model, **config: str) -> Any:
        spec = ModelSpec(name=name, base_path=ir.save(model, tmp_path, name))
        file = tmp_path / name / "1/model.xml"
        return share(ov.Core().read_model(file), ModelFile(file, spec), {"only": "this test", **config})

    first = load("first", ir.accumulator())
    assert load("same", ir.accumulator()) is first
    assert load("settings", ir.accumulator(), NUM_STREAMS="1") is not first
    assert load("weights", ir.accumulator(offset=1.0)) is not first
    assert load("dynamic", ir.dynamic()) is not load("dynamic again", ir.dynamic())
    assert compiled == ["first", "settings", "weights", "dynamic", "dynamic again"]


@asynccontextmanager
async def serve(**settings: Any) -> AsyncIterator[dict[str, Any]]:
    await trio.lowlevel.checkpoint()
    if "error" in settings:
        raise OSError(settings["error"])
    model = {**settings, "loop": trio.lowlevel.current_trio_token()}
    yield model
    model["closed"] = True


@on_model_loop
async def check(model: dict[str, Any], value: int) -> None:
    assert trio.lowlevel.current_trio_token() is model["loop"]
    assert model["size"] == value


def test_equal_settings_share_a_model() -> None:
    before = threading.active_count()
    with hosts_of(serve) as host_of:
        one, other = host_of(size=1), host_of(size=2)
        assert host_of(size=1) is one
        check(model=one, value=1)
        check(model=other, value=2)
        with pytest.raises(AssertionError):
            check(model=other, value=1)
        assert "closed" not in one.model
    assert one.model["closed"]
    assert other.model["closed"]
    assert threading.active_count() <= before + 2


def test_failed_load_is_raised() -> None:
    with hosts_of(serve) as host_of:
        with pytest.raises(OSError, match="no such model"):
            host_of(error="no such model")
        check(model=host_of(size=3), value=3)


def test_failure_of_the_loop_is_raised_at_the_end() -> None:
    @asynccontextmanager
    async def serve_badly(**_: Any) -> AsyncIterator[dict[str, Any]]:
        async with trio.open_nursery() as nursery:
            yield {"nursery": nursery}

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise OSError("engine lost")

    @on_model_loop
    async def break_down(model: dict[str, Any]) -> None:
        model["nursery"].start_soon(fail)
        await trio.lowlevel.checkpoint()

    with pytest.raises(ExceptionGroup) as caught, hosts_of(serve_badly) as host_of:
        break_down(model=host_of())
    assert caught.group_contains(OSError, match="engine lost")
