"""What is kept of compiled models from one start to the next, and what comes of it when it is damaged."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest
import trio

from ovmstrio.config.specs import ModelSpec
from ovmstrio.core.errors import ConfigError
from ovmstrio.core.request import InferRequest
from ovmstrio.core.tensor import Array, Tensor
from ovmstrio.openvino.compile import ModelFile, compile_model
from ovmstrio.openvino.compiled_files import CompiledFiles, compiled_files, keeping_compiled_files
from ovmstrio.runtimes.models.load_model import load_model
from tests.support import ir
from tests.support.servables import EXACT, raw_request

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


def _write(files: CompiledFiles, key: str, content: bytes) -> None:
    lent = files.lend(key)
    assert lent is not None
    (lent.place / "17.blob").write_bytes(content)
    lent.keep()
    lent.give_back()


def _lent(files: CompiledFiles, key: str) -> list[bytes]:
    lent = files.lend(key)
    assert lent is not None
    return [path.read_bytes() for path in lent.place.glob("*.blob")]


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


NO_ENTRIES = ["", "[]", '{"17.blob": 3}', "\\xff", '{"../../x": ["../y", 1, 2]}', '{"17.blob": ["x\\u0000", 1, 2]}']
TOO_LONG = f'{{"17.blob": ["{"x" * 300}", 1, 2]}}'


@pytest.mark.parametrize("text", [*NO_ENTRIES, TOO_LONG])
def test_an_entry_that_is_none_counts_for_nothing(text: str, tmp_path: Path) -> None:
    """Whatever is in its file, which leads nowhere outside the folder; another one takes its place."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        _write(_open(), "a", b"compiled")
    (tmp_path / "entries" / "a.json").write_text(text)

    with keeping_compiled_files(tmp_path, ENOUGH):
        assert _lent(_open(), "a") == []
        _write(_open(), "a", b"again")
        assert _lent(_open(), "a") == [b"again"]


def test_a_file_that_is_larger_than_all_may_be_pushes_no_other_one_out(tmp_path: Path) -> None:
    """It is not kept, and is not written at all where that can be told before."""
    with keeping_compiled_files(tmp_path, 25):
        _write(_open(), "a", b"a" * 10)
        _write(_open(), "b", b"b" * 26)
        assert _lent(_open(), "a") == [b"a" * 10]
        assert _lent(_open(), "b") == []
        assert _open().lend("b", 26) is None


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
            both = [first.lend("a"), second.lend("a")]
            for lent, content in zip(both, (b"by the first", b"by the second"), strict=True):
                assert lent is not None
                (lent.place / "17.blob").write_bytes(content)
            for lent in both:
                assert lent is not None
                lent.keep()
            assert [path.read_bytes() for path in tmp_path.glob("run-*/a-*/17.blob")].count(b"by the first") == 1
    assert len(_files(tmp_path, "blobs")) == 1
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


def test_of_several_that_keep_the_same_at_the_same_time_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes of one server do, which would push others' files out by as many copies."""
    fsync = os.fsync
    with keeping_compiled_files(tmp_path, ENOUGH):
        lent = [_open().lend("a") for _ in range(2)]
        for each in lent:
            assert each is not None
            (each.place / "17.blob").write_bytes(b"compiled")
        first, second = lent
        assert first is not None
        assert second is not None

        def keep_the_other(descriptor: int) -> None:
            monkeypatch.setattr(os, "fsync", fsync)
            second.keep()
            fsync(descriptor)

        # The first file is written to the disk before the lock is taken.
        monkeypatch.setattr(os, "fsync", keep_the_other)
        first.keep()
    assert len(_files(tmp_path, "blobs")) == 1


@pytest.mark.parametrize("shared", [".", "blobs", "entries"])
def test_a_folder_in_which_others_may_put_files_is_not_used(shared: str, tmp_path: Path) -> None:
    """What is read there runs in the server."""
    with keeping_compiled_files(tmp_path, ENOUGH):
        assert compiled_files() is not None
    (tmp_path / shared).chmod(0o777)
    with keeping_compiled_files(tmp_path, ENOUGH):
        assert compiled_files() is None


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another user has made one in a folder for caches that both have."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with keeping_compiled_files(tmp_path, ENOUGH):
        assert compiled_files() is None


def test_a_folder_that_nobody_knows_is_not_made_where_the_server_happens_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a user without a home, of which nothing is known but that it begins with a tilde."""
    monkeypatch.chdir(tmp_path)
    with keeping_compiled_files(Path("~/.cache/ovmstrio/compiled"), ENOUGH):
        assert compiled_files() is None
    assert list(tmp_path.iterdir()) == []


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


async def test_links_of_a_model_go_with_the_model(tmp_path: Path) -> None:
    """A server that reloads for months would keep what is not kept any more on the disk by them."""
    repository, folder = ir.save(_many_operations(), tmp_path, "model"), tmp_path / "kept"
    spec = ModelSpec(name="model", base_path=repository, plugin_config=EXACT)
    with keeping_compiled_files(folder, ENOUGH):
        async with trio.open_nursery() as tasks:
            servable = await load_model(spec, 1, repository / "1", tasks=tasks)
        assert len(list(folder.glob("run-*/*/*.blob"))) == 1
        await servable.aclose()
        del servable
        gc.collect()
        assert list(folder.glob("run-*/*-*")) == []

        (repository / "1" / "model.xml").write_text("no model")
        async with trio.open_nursery() as tasks:
            with pytest.raises(ConfigError):
                await load_model(spec, 1, repository / "1", tasks=tasks)
        assert list(folder.glob("run-*/*-*")) == []


async def test_what_nobody_keeps_is_not_written(tmp_path: Path) -> None:
    """As of models of handlers, which have no tasks that would do it later."""
    repository, folder = ir.save(_many_operations(), tmp_path, "model"), tmp_path / "kept"
    with keeping_compiled_files(folder, ENOUGH):
        servable = await load_model(ModelSpec(name="model", base_path=repository), 1, repository / "1")
        assert list(folder.glob("run-*/*/*.blob")) == []
        await servable.aclose()


def test_a_model_whose_folder_has_gone_is_compiled_again_without_it(tmp_path: Path) -> None:
    """Caches may be removed at any time, and no folder comes back that nobody would remove."""
    repository = ir.save(_many_operations(), tmp_path, "model")
    with keeping_compiled_files(tmp_path / "kept", ENOUGH):
        lent = _open().lend("a")
        assert lent is not None
        spec = ModelSpec(name="model", base_path=repository, plugin_config=EXACT)
        compiled = compile_model(ModelFile(repository / "1" / "model.xml", spec, kept=lent.place))
        assert len(list(lent.place.glob("*.blob"))) == 1
        lent.give_back()
        compiled.compile_again()
        assert not lent.place.exists()


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
