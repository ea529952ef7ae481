from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.linalg.lapack_lite as any_library
import openvino as ov
import openvino.opset13 as op
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.tensor import Array
from ovmstrio.inference.blob_cache import (
    BlobCache,
    BlobCacheFolder,
    drop_page_cache,
    open_blob_cache,
)
from ovmstrio.inference.compile import ModelFile, compile_model
from ovmstrio.models.loading import load_model
from tests.support import ir
from tests.support.servables import EXACT, raw_request, tensors

pytestmark = pytest.mark.compiles

ONES = np.ones((1, 8), np.float32)
ENOUGH = 10**9


def _many_operations(layers: int = 60) -> ov.Model:
    """FP32 ``x`` [1, 8] to ``y`` of the same shape by more than a hundred operations."""
    x = ir.parameter("x", [1, 8])
    node = x
    random = np.random.default_rng(0)
    for _ in range(layers):
        node = op.tanh(op.matmul(node, op.constant(random.random((8, 8), np.float32)), False, False))
    return ir.named_model({"y": node}, [x], "many")


def _files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).iterdir())


def _lend(files: BlobCache, key: str, content: bytes | None = None) -> BlobCacheFolder:
    lent = files.lend(key)
    assert lent is not None
    if content is not None:
        (lent.place / "17.blob").write_bytes(content)
    return lent


def _write(files: BlobCache, key: str, content: bytes) -> None:
    lent = _lend(files, key, content)
    lent.keep()
    lent.release()


def _lent(files: BlobCache, key: str) -> list[bytes]:
    return [path.read_bytes() for path in _lend(files, key).place.glob("*.blob")]


@contextmanager
def _keeping(folder: Path, max_output_bytes: int = 10**9) -> Iterator[BlobCache]:
    with open_blob_cache(folder, max_output_bytes) as files:
        assert files is not None
        yield files


def test_next_server_reads_files_by_the_key_of_the_model(tmp_path: Path) -> None:
    with _keeping(tmp_path) as files:
        _write(files, "a", b"compiled")
    assert not list(tmp_path.glob("run-*"))
    with _keeping(tmp_path) as files:
        assert _lent(files, "a") == [b"compiled"]
        assert _lent(files, "b") == []


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "[]",
        '{"17.blob": 3}',
        "\\xff",
        '{"../../x": ["../y", 1, 2]}',
        '{"17.blob": ["x\\u0000", 1, 2]}',
        f'{{"17.blob": ["{"x" * 300}", 1, 2]}}',
    ],
)
def test_invalid_entry_is_ignored_and_replaced(entry: str, tmp_path: Path) -> None:
    with _keeping(tmp_path) as files:
        _write(files, "a", b"compiled")
    (tmp_path / "entries" / "a.json").write_text(entry)
    with _keeping(tmp_path) as files:
        assert _lent(files, "a") == []
        _write(files, "a", b"again")
        assert _lent(files, "a") == [b"again"]


def test_file_larger_than_the_limit_evicts_no_other_file(tmp_path: Path) -> None:
    with _keeping(tmp_path, 25) as files:
        _write(files, "a", b"a" * 10)
        _write(files, "b", b"b" * 26)
        assert _lent(files, "a") == [b"a" * 10]
        assert _lent(files, "b") == []
        assert files.lend("b", 26) is None


def test_least_recently_used_files_are_evicted_with_their_entries(tmp_path: Path) -> None:
    with _keeping(tmp_path, 25) as files:
        for number, key in enumerate("abc"):
            _write(files, key, key.encode() * 10)
            for blob in _files(tmp_path, "blobs"):
                if blob.read_bytes() == key.encode() * 10:
                    os.utime(blob, (number, number))
        _write(files, "d", b"d" * 10)
    assert [path.name for path in _files(tmp_path, "entries")] == ["c.json", "d.json"]
    assert sorted(path.read_bytes()[:1] for path in _files(tmp_path, "blobs")) == [b"c", b"d"]


def test_two_servers_may_write_the_same_model_at_once(tmp_path: Path) -> None:
    with _keeping(tmp_path) as first, _keeping(tmp_path) as second:
        both = [_lend(first, "a", b"by the first"), _lend(second, "a", b"by the second")]
        for lent in both:
            lent.keep()
        assert [path.read_bytes() for path in tmp_path.glob("run-*/a-*/17.blob")].count(b"by the first") == 1
    assert len(_files(tmp_path, "blobs")) == 1
    with _keeping(tmp_path) as third:
        (found,) = _lent(third, "a")
    assert found in (b"by the first", b"by the second")


def test_files_of_a_killed_server_are_removed_and_those_of_a_running_one_are_not(tmp_path: Path) -> None:
    with _keeping(tmp_path):
        (running,) = tmp_path.glob("run-*")
        killed = tmp_path / "run-killed"
        killed.mkdir()
        (killed / "lock").touch()
        with _keeping(tmp_path):
            assert not killed.exists()
            assert running.exists()


def test_processes_of_one_server_keep_one_copy_of_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    with _keeping(tmp_path) as files:
        first, second = (_lend(files, "a", b"compiled") for _ in range(2))

        def keep_the_other(descriptor: int) -> None:
            monkeypatch.setattr(os, "fsync", fsync)
            second.keep()
            fsync(descriptor)

        # The first file is written to the disk before the lock is taken.
        monkeypatch.setattr(os, "fsync", keep_the_other)
        first.keep()
    assert len(_files(tmp_path, "blobs")) == 1


def _other_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)


def _writable_by_others(name: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def prepare(folder: Path, _: pytest.MonkeyPatch) -> None:
        with _keeping(folder):
            pass
        (folder / name).chmod(0o777)

    return prepare


@pytest.mark.parametrize(
    "prepare",
    [
        *(
            pytest.param(_writable_by_others(name), id=f"{name} is writable by others")
            for name in ("", "blobs", "entries")
        ),
        pytest.param(_other_owner, id="of another user"),
        pytest.param(lambda folder, _: (folder.rmdir(), folder.touch()), id="a file"),
    ],
)
def test_unsafe_folder_is_not_used(
    prepare: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files that are read from the folder run in the server.
    folder = tmp_path / "kept"
    folder.mkdir()
    prepare(folder, monkeypatch)
    with open_blob_cache(folder, ENOUGH) as files:
        assert files is None


@pytest.mark.parametrize(("folder", "max_output_bytes"), [("none", 0), ("~/.cache/ovmstrio/compiled", ENOUGH)])
def test_no_folder_is_made_for_no_bytes_or_an_unknown_home(
    folder: str, max_output_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_blob_cache(Path(folder), max_output_bytes) as files:
        assert files is None
    assert list(tmp_path.iterdir()) == []


async def _answer(repository: Path, files: BlobCache, **settings: Any) -> Array:
    spec = ModelSpec(name="model", base_path=repository, plugin_config=EXACT, **settings)
    async with trio.open_nursery() as tasks:
        servable = await load_model(spec, 1, repository / "1", tasks=tasks, blobs=files)
        (output,) = tensors(await servable.infer(raw_request({"x": ONES})))
        await servable.aclose()
    return output.array


async def test_second_start_reads_the_files_and_damaged_ones_are_written_again(tmp_path: Path) -> None:
    repository, folder = ir.save(_many_operations(), tmp_path, "model"), tmp_path / "kept"
    with _keeping(folder) as files:
        expected = await _answer(repository, files)
    (blob,) = _files(folder, "blobs")
    with _keeping(folder) as files:
        np.testing.assert_array_equal(await _answer(repository, files), expected)
    assert _files(folder, "blobs") == [blob]
    # OpenVINO would read a file with one wrong bit, and compute other numbers.
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with _keeping(folder) as files:
        np.testing.assert_array_equal(await _answer(repository, files), expected)
    (other,) = _files(folder, "blobs")
    assert other != blob


@pytest.mark.parametrize(("columns", "count"), [(2**16, 1), (2**15, 0)])
async def test_files_of_models_with_large_f16_weights_are_kept(columns: int, count: int, tmp_path: Path) -> None:
    x = ir.parameter("x", [1, 8])
    weights = op.convert(op.constant(np.full((8, columns), 0.5, np.float16)), "f32")
    model = ir.named_model({"y": op.matmul(x, weights, False, False)}, [x], "halves")
    repository, folder = ir.save(model, tmp_path, "model"), tmp_path / "kept"
    for _ in range(2):
        with _keeping(folder) as files:
            np.testing.assert_array_equal(await _answer(repository, files), np.full((1, columns), 4, np.float32))
        assert len(_files(folder, "blobs")) == count


async def test_links_of_a_model_are_removed_when_it_is_closed_or_cannot_be_loaded(tmp_path: Path) -> None:
    repository, folder = ir.save(_many_operations(), tmp_path, "model"), tmp_path / "kept"
    spec = ModelSpec(name="model", base_path=repository, plugin_config=EXACT)
    with _keeping(folder) as files:
        # A model without tasks, as those of handlers, writes nothing.
        servable = await load_model(spec, 1, repository / "1", blobs=files)
        assert list(folder.glob("run-*/*/*.blob")) == []
        await servable.aclose()
        async with trio.open_nursery() as tasks:
            servable = await load_model(spec, 1, repository / "1", tasks=tasks, blobs=files)
        assert len(list(folder.glob("run-*/*/*.blob"))) == 1
        await servable.aclose()
        del servable
        gc.collect()
        assert list(folder.glob("run-*/*-*")) == []
        (repository / "1" / "model.xml").write_text("no model")
        async with trio.open_nursery() as tasks:
            with pytest.raises(ConfigError):
                await load_model(spec, 1, repository / "1", tasks=tasks, blobs=files)
        assert list(folder.glob("run-*/*-*")) == []


def test_model_whose_folder_was_removed_is_compiled_again_without_a_folder(tmp_path: Path) -> None:
    repository = ir.save(_many_operations(), tmp_path, "model")
    with _keeping(tmp_path / "kept") as files:
        lent = _lend(files, "a")
        spec = ModelSpec(name="model", base_path=repository, plugin_config=EXACT)
        compiled = compile_model(ModelFile(repository / "1" / "model.xml", spec, kept=lent.place))
        assert len(list(lent.place.glob("*.blob"))) == 1
        lent.release()
        compiled.compile_replacement()
        assert not lent.place.exists()


async def test_small_models_and_those_with_a_configured_cache_are_not_kept(tmp_path: Path) -> None:
    small, large = ir.save(ir.dummy((1, 8)), tmp_path, "small"), ir.save(_many_operations(), tmp_path, "large")
    folder, own = tmp_path / "kept", tmp_path / "own"
    with _keeping(folder) as files:
        spec = ModelSpec(name="small", base_path=small)
        async with trio.open_nursery() as tasks:
            await (await load_model(spec, 1, small / "1", tasks=tasks, blobs=files)).aclose()
        await _answer(large, files, cache_dir=own)
    assert _files(folder, "blobs") == []
    assert len(list(own.glob("*.blob"))) == 1


pytestmark = pytest.mark.compiles

SIZE = 8 * 2**20


def _resident_kb(file: Path) -> int:
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in line and "-" in line.split()[0]:
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def _save_product(folder: Path, weights: np.ndarray[Any, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    x = op.parameter([-1, len(weights)], np.float32)
    ov.save_model(ov.Model([op.matmul(x, weights, False, False)], [x]), folder / "m.xml", compress_to_fp16=False)
    return folder / "m.xml"


def test_pages_of_mapped_files_are_released_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert _resident_kb(file) >= SIZE // 1024
        assert drop_page_cache(tmp_path) >= SIZE
        assert _resident_kb(file) == 0
        assert mapped[-1] == 255


def test_pages_of_writable_mappings_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(SIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[0] = 7
        assert drop_page_cache(tmp_path) == 0
        assert mapped[0] == 7


def test_pages_of_libraries_are_kept(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    shutil.copy(any_library.__file__, library)
    ctypes.CDLL(str(library))
    assert drop_page_cache(tmp_path) == 0


@pytest.mark.parametrize("batch", [1, 5])
def test_model_computes_the_same_after_its_pages_are_released(tmp_path: Path, batch: int) -> None:
    weights = np.random.default_rng(0).random((512, 512), np.float32)
    compiled = ov.Core().compile_model(_save_product(tmp_path, weights), "CPU", EXACT)
    request = compiled.create_infer_request()
    request.infer([np.ones((1, 512), np.float32)])
    assert drop_page_cache(tmp_path) > 0
    (answer,) = request.infer([np.ones((batch, 512), np.float32)]).values()
    np.testing.assert_allclose(answer, np.repeat(weights.sum(0, keepdims=True), batch, 0), rtol=1e-4)


@pytest.mark.parametrize("is_cached", [False, True])
async def test_loaded_model_keeps_no_pages_of_its_files(tmp_path: Path, is_cached: bool) -> None:
    folder, cache = tmp_path / "m" / "1", tmp_path / "cache"
    _save_product(folder, np.random.default_rng(0).random((1024, 2048), np.float32))
    spec = ModelSpec(name="m", base_path=tmp_path / "m", cache_dir=cache if is_cached else None)
    for _ in range(2):
        servable = await load_model(spec, 1, folder)
        assert sum(map(_resident_kb, [folder / "m.bin", *cache.glob("*.blob")])) == 0
        await servable.aclose()
    assert bool(list(cache.glob("*.blob"))) is is_cached
