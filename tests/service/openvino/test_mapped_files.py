"""Weights are in memory once: pages of a model's file that compiling has read are let go, and come back on demand."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from pathlib import Path

import numpy as np
import numpy.linalg.lapack_lite as any_library
import openvino as ov
import openvino.opset13 as op
import pytest

from ovmstrio.config.specs import ModelSpec
from ovmstrio.openvino.mapped_files import let_file_pages_go
from ovmstrio.runtimes.models.load_model import load_model

pytestmark = pytest.mark.compiles

SIZE = 8 * 2**20


def _resident_kb(file: Path) -> int:
    """Sum up what this process has of a file in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if " " in line and "-" in line.split()[0]:
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_pages_of_mapped_files_go_and_come_back_with_the_same_bytes(tmp_path: Path) -> None:
    """A file that was read through its mapping takes no memory afterwards, and is read again when it is looked at."""
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert _resident_kb(file) >= SIZE // 1024

        assert let_file_pages_go(tmp_path) >= SIZE

        assert _resident_kb(file) == 0
        assert mapped[-1] == 255


def test_what_was_changed_in_memory_stays(tmp_path: Path) -> None:
    """A mapping that may have been written to, whose bytes are nowhere else, is left alone."""
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(SIZE))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[0] = 7

        assert let_file_pages_go(tmp_path) == 0

        assert mapped[0] == 7


def test_what_the_linker_wrote_into_a_library_stays(tmp_path: Path) -> None:
    """Its tables cannot be written to once it is loaded, and are not those of its file."""
    library = tmp_path / "library.so"
    shutil.copy(any_library.__file__, library)
    ctypes.CDLL(str(library))

    assert let_file_pages_go(tmp_path) == 0


@pytest.mark.parametrize("batch", [1, 5])
def test_a_model_gives_the_same_numbers_afterwards(tmp_path: Path, batch: int) -> None:
    """A model whose file's pages are gone runs as before, for a shape that it knows and for one that is new."""
    weights = np.random.default_rng(0).random((512, 512), np.float32)
    x = op.parameter([-1, 512], np.float32)
    ov.save_model(ov.Model([op.matmul(x, weights, False, False)], [x]), tmp_path / "m.xml", compress_to_fp16=False)
    compiled = ov.Core().compile_model(tmp_path / "m.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = compiled.create_infer_request()
    request.infer([np.ones((1, 512), np.float32)])

    assert let_file_pages_go(tmp_path) > 0

    (answer,) = request.infer([np.ones((batch, 512), np.float32)]).values()
    np.testing.assert_allclose(answer, np.repeat(weights.sum(0, keepdims=True), batch, 0), rtol=1e-4)


@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_loaded_model_keeps_nothing_of_its_files(tmp_path: Path, is_cached: bool) -> None:
    """What OpenVINO has mapped of weights, and of what it compiled before, takes no memory once a model is loaded."""
    folder, cache = tmp_path / "m" / "1", tmp_path / "cache"
    folder.mkdir(parents=True)
    weights = np.random.default_rng(0).random((1024, 2048), np.float32)
    x = op.parameter([-1, 1024], np.float32)
    ov.save_model(ov.Model([op.matmul(x, weights, False, False)], [x]), folder / "m.xml", compress_to_fp16=False)
    spec = ModelSpec(name="m", base_path=tmp_path / "m", cache_dir=cache if is_cached else None)
    for _ in range(2):
        servable = await load_model(spec, 1, folder)
        assert sum(map(_resident_kb, [folder / "m.bin", *cache.glob("*.blob")])) == 0
        await servable.aclose()
    assert bool(list(cache.glob("*.blob"))) is is_cached
