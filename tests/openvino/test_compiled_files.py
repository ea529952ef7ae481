"""What is kept of compiled models from one start to the next, and what comes of it when it is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import Array, Tensor
from ovmstrio.openvino.compiled_files import CompiledFiles, compiled_files, keeping_compiled_files
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.servables import EXACT, raw_request

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


def _write(files: CompiledFiles, key: str, content: bytes) -> None:
    place = files.lend(key)
    assert place is not None
    (place / "17.blob").write_bytes(content)
    files.keep(key)


def _lent(files: CompiledFiles, key: str) -> list[bytes]:
    place = files.lend(key)
    assert place is not None
    return [path.read_bytes() for path in place.glob("*.blob")]


def _open() -> CompiledFiles:
    """Give the files of the block that is open."""
    found = compiled_files()
    assert found is not None
    return found


def test_what_one_server_has_written_the_next_one_reads(tmp_path: Path) -> None:
    """By the model's key, and nothing by another one; links go with the server that made them."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        _write(_open(), "a", b"compiled")
    assert not list(tmp_path.glob("run-*"))

    with keeping_compiled_files(tmp_path, ENOUGH):
        assert _lent(_open(), "a") == [b"compiled"]
        assert _lent(_open(), "b") == []


def test_a_damaged_file_is_not_lent_and_is_removed(tmp_path: Path) -> None:
    """One byte is enough, as OpenVINO would read it and give other numbers."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        _write(_open(), "a", b"compiled")
    (blob,) = _files(tmp_path, "blobs")
    blob.write_bytes(b"compilEd")

    with keeping_compiled_files(tmp_path, ENOUGH):
        assert _lent(_open(), "a") == []
        assert _files(tmp_path, "blobs") == []
        _write(_open(), "a", b"again")
        assert _lent(_open(), "a") == [b"again"]


@pytest.mark.parametrize("text", ["", "[]", '{"17.blob": 3}', "\\xff", '{"../../x": ["../y", 1, 2]}'])
def test_an_entry_that_is_none_counts_for_nothing(text: str, tmp_path: Path) -> None:
    """Whatever is in its file, which leads nowhere outside the folder."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        _write(_open(), "a", b"compiled")
    (tmp_path / "entries" / "a.json").write_text(text)

    with keeping_compiled_files(tmp_path, ENOUGH):
        assert _lent(_open(), "a") == []


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    """As soon as there are more bytes than may be, with its entry."""
    with keeping_compiled_files(tmp_path, 25):
        files = _open()
        for number, key in enumerate("abc"):
            _write(files, key, key.encode() * 10)
            for blob in _files(tmp_path, "blobs"):
                if blob.read_bytes() == key.encode() * 10:
                    os.utime(blob, (number, number))
        _write(files, "d", b"d" * 10)

    assert [path.name for path in _files(tmp_path, "entries")] == ["c.json", "d.json"]
    assert sorted(path.read_bytes()[:1] for path in _files(tmp_path, "blobs")) == [b"c", b"d"]


def test_two_servers_write_the_same_model_at_once(tmp_path: Path) -> None:
    """Each reads what it has itself until it ends, and one of the two files is what a third one gets."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        first = _open()
        with keeping_compiled_files(tmp_path, ENOUGH):
            second = _open()
            for files, content in ((first, b"by the first"), (second, b"by the second")):
                place = files.lend("a")
                assert place is not None
                (place / "17.blob").write_bytes(content)
            first.keep("a")
            second.keep("a")
            assert [path.read_bytes() for path in tmp_path.glob("run-*/a/17.blob")].count(b"by the first") == 1
    with keeping_compiled_files(tmp_path, ENOUGH):
        (found,) = _lent(_open(), "a")
    assert found in (b"by the first", b"by the second")


def test_what_a_killed_server_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    """The lock that the process had tells them apart."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        (living,) = tmp_path.glob("run-*")
        dead = tmp_path / "run-dead"
        dead.mkdir()
        (dead / "lock").touch()
        with keeping_compiled_files(tmp_path, ENOUGH):
            assert not dead.exists()
            assert living.exists()


def test_nothing_is_kept_where_that_is_not_wanted_or_not_possible(tmp_path: Path) -> None:
    """With no bytes to keep nothing is made, and a folder that cannot be made is none."""
    with keeping_compiled_files(tmp_path / "none", 0):
        assert compiled_files() is None
    assert not (tmp_path / "none").exists()

    (tmp_path / "file").touch()
    with keeping_compiled_files(tmp_path / "file", ENOUGH):
        assert compiled_files() is None


async def _answer(repository: Path, **settings: object) -> Array:
    spec = ModelSpec(name="model", base_path=repository, plugin_config=EXACT, **settings)
    async with trio.open_nursery() as tasks:
        servable = await load_model(spec, 1, repository / "1", tasks=tasks)
        request: InferRequest = raw_request({"x": ONES})
        response = await servable.infer(request)
        await servable.aclose()
    (output,) = response.outputs
    assert isinstance(output, Tensor)
    return output.array


async def test_a_model_is_read_at_the_second_start_and_answers_the_same(tmp_path: Path) -> None:
    """What is kept is what is read, also behind a damage, which has it written again."""
    repository, folder = ir.save(_many_operations(), tmp_path, "model"), tmp_path / "kept"
    with keeping_compiled_files(folder, ENOUGH):
        expected = await _answer(repository)
    (blob,) = _files(folder, "blobs")

    with keeping_compiled_files(folder, ENOUGH):
        np.testing.assert_array_equal(await _answer(repository), expected)
    assert _files(folder, "blobs") == [blob]

    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with keeping_compiled_files(folder, ENOUGH):
        np.testing.assert_array_equal(await _answer(repository), expected)
    (other,) = _files(folder, "blobs")
    assert other != blob


async def test_small_models_and_those_with_a_folder_of_their_user_are_not_kept(tmp_path: Path) -> None:
    """The first compile as fast as they are read; the second are where their user wants them."""
    small = ir.save(ir.dummy((1, 8)), tmp_path, "small")
    large = ir.save(_many_operations(), tmp_path, "large")
    folder, own = tmp_path / "kept", tmp_path / "own"
    with keeping_compiled_files(folder, ENOUGH):
        spec = ModelSpec(name="small", base_path=small)
        async with trio.open_nursery() as tasks:
            await (await load_model(spec, 1, small / "1", tasks=tasks)).aclose()
        await _answer(large, cache_dir=own)

    assert _files(folder, "blobs") == []
    assert len(list(own.glob("*.blob"))) == 1
