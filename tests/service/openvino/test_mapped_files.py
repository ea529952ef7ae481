from __future__ import annotations

import ctypes
import mmap
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.linalg.lapack_lite as any_library
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.openvino.mapped_files import let_file_pages_go
from ovmstrio.runtimes.models.load_model import load_model
from tests.support.servables import EXACT

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
        assert let_file_pages_go(tmp_path) >= SIZE
        assert _resident_kb(file) == 0
        assert mapped[-1] == 255


def test_pages_of_writable_mappings_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(SIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[0] = 7
        assert let_file_pages_go(tmp_path) == 0
        assert mapped[0] == 7


def test_pages_of_libraries_are_kept(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    shutil.copy(any_library.__file__, library)
    ctypes.CDLL(str(library))
    assert let_file_pages_go(tmp_path) == 0


@pytest.mark.parametrize("batch", [1, 5])
def test_model_computes_the_same_after_its_pages_are_released(tmp_path: Path, batch: int) -> None:
    weights = np.random.default_rng(0).random((512, 512), np.float32)
    compiled = ov.Core().compile_model(_save_product(tmp_path, weights), "CPU", EXACT)
    request = compiled.create_infer_request()
    request.infer([np.ones((1, 512), np.float32)])
    assert let_file_pages_go(tmp_path) > 0
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
