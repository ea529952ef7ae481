"""GGUF files are made into folders once, by their content, and nothing is written beside them."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.generation import Task
from ovmstrio.openvino.engine.gguf_header import GgufError, read_header
from ovmstrio.runtimes.generation.loading import LOADERS
from tests.support.tiny_llm import CONTEXT, write_tiny_gguf
from tests.system.runtimes.generation.conftest import ServeTiny
from tests.system.runtimes.generation.test_text_model import greedy, made, text_of


async def test_a_gguf_file_is_converted_once_and_makes_the_text_of_its_folder(
    serve_tiny: ServeTiny, tmp_path: Path
) -> None:
    """The second load finds what the first has made, wherever the same file lies."""
    file = write_tiny_gguf(tmp_path / "model.gguf")
    cache = tmp_path / "cache"
    async with serve_tiny() as model:
        expected = text_of(await made(model, greedy("hello", 30)))
    async with serve_tiny(path=file, cache_dir=cache) as model:
        assert text_of(await made(model, greedy("hello", 30))) == expected
        assert model.limits.context_length == CONTEXT
    (folder,) = (cache / "text_models").iterdir()
    marked = folder.stat().st_mtime_ns
    (tmp_path / "other").mkdir()
    other = file.rename(tmp_path / "other" / "renamed.gguf")
    async with serve_tiny(path=other.parent, cache_dir=cache) as model:
        assert text_of(await made(model, greedy("hello", 30))) == expected
    assert [each.stat().st_mtime_ns for each in (cache / "text_models").iterdir()] == [marked]
    assert [each.name for each in other.parent.iterdir()] == ["renamed.gguf"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a model", "does not begin as GGUF files do"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "damaged"),
    ],
)
async def test_a_file_that_is_no_gguf_file_is_refused_with_what_is_wrong(
    serve_tiny: ServeTiny, tmp_path: Path, content: bytes, said: str
) -> None:
    """Nobody has to guess from the library's words."""
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(GgufError, match=said):
        read_header(file)
    with pytest.raises(ConfigError, match=said):
        async with serve_tiny(path=file, cache_dir=tmp_path / "cache"):
            pytest.fail("it was loaded")


def gguf(tensors: Sequence[tuple[bytes, tuple[int, ...], int, int]], *keys: bytes, data: int = 0) -> bytes:
    """Encode a file of tensors (name, shape, type, offset) with so many bytes of data."""
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    for name, shape, kind, offset in tensors:
        content += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        content += struct.pack("<IQ", kind, offset)
    return content + bytes(-len(content) % 32) + bytes(data)


def integer(key: bytes, value: int) -> bytes:
    """Encode a key of an integer."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            gguf([(b"a", (32,), 0, 0), (b"b", (64,), 8, 128)], data=195),
            'tensor "b" is incomplete: expected 68 bytes',
        ),
        (gguf([(b"a", (32,), 0, 0), (b"b", (64,), 8, 128)], data=100), 'tensor "a" is incomplete: expected 128 bytes'),
        (gguf([(b"a", (2**40, 2**40, 2**40), 0, 0)]), 'tensor "a" is incomplete: expected'),
        (gguf([(b"a", (8,), 0, 2**64 - 32)], data=64), 'tensor "a" is incomplete: expected 32 bytes, got 0'),
        (gguf([(b"a", (32,), 0, 0), (b"b", (32,), 0, 64)], data=256), 'tensor "b" overlaps tensor "a"'),
        (gguf([(b"a", (33,), 8, 0)], data=256), 'tensor "a" has rows of'),
        (gguf([(b"a", (32,), 0, 8)], data=256), 'tensor "a" begins at 8, expected a multiple of 32'),
        (gguf([(b"a", (32,), 0, 32)], integer(b"general.alignment", 64), data=256), "expected a multiple of 64"),
        (gguf([], integer(b"general.alignment", 0)), "general.alignment is 0"),
        (gguf([(b"a", (1,) * 9, 0, 0)], data=256), 'tensor "a" has 9 dimensions'),
        (gguf([(b"a", (1,), 999, 0)], data=256), 'tensor "a" has the unknown type 999'),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**50, 0), "tensors"),
        (gguf([], struct.pack("<QcI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 50), "damaged"),
        (gguf([], struct.pack("<QcIIQ", 1, b"k", 9, 8, 2**40)), "damaged"),
        (gguf([], struct.pack("<QcIIQ", 1, b"k", 9, 12, 2**61)), "ends within its header"),
        (gguf([], struct.pack("<Q", 2**17) + bytes(2**17)), "damaged"),
    ],
)
def test_a_file_without_all_bytes_of_its_tensors_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    """The tensor is named, with the bytes that it needs and those that are there."""
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(GgufError, match=re.escape(said)):
        read_header(file)


def test_the_last_byte_of_the_last_tensor_is_enough(tmp_path: Path) -> None:
    """No padding need follow."""
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf([(b"b", (64,), 8, 128), (b"a", (32,), 0, 0)], integer(b"k", 7), data=196))
    assert read_header(file) == {"k": 7}


@pytest.mark.parametrize("cut", [1, 5000])
async def test_a_model_that_was_cut_off_does_not_load(serve_tiny: ServeTiny, tmp_path: Path, cut: int) -> None:
    """It would answer with other texts; the error names the file and a tensor."""
    file = write_tiny_gguf(tmp_path / "model.gguf")
    os.truncate(file, file.stat().st_size - cut)
    with pytest.raises(ConfigError, match=r'tensor ".*" is incomplete: expected \d+ bytes, got \d+.*model\.gguf'):
        async with serve_tiny(path=file, cache_dir=tmp_path / "cache"):
            pytest.fail("it was loaded")


async def test_an_architecture_that_cannot_be_read_is_named(serve_tiny: ServeTiny, tmp_path: Path) -> None:
    """The way out is told with it."""
    file = tmp_path / "model.gguf"
    key, value = b"general.architecture", b"gemma3"
    text = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    with pytest.raises(ConfigError, match=r"llama, qwen2, qwen3.*gemma3"):
        async with serve_tiny(path=file, cache_dir=tmp_path / "cache"):
            pytest.fail("it was loaded")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("openvino_language_model.xml", "models that take images or sound beside text are not served"),
        ("model_index.json", "models that make images are not served"),
        ("openvino_encoder_model.xml", "its task is speech2text or text2speech"),
    ],
)
async def test_a_folder_of_another_sort_of_model_is_known_for_that(
    serve_tiny: ServeTiny, tmp_path: Path, file: str, words: str
) -> None:
    """By a file that it has; what to do is said."""
    (tmp_path / file).write_text("")
    with pytest.raises(ConfigError, match=words):
        async with serve_tiny(path=tmp_path):
            pass


@pytest.mark.parametrize("task", list(LOADERS))
async def test_a_folder_with_a_fifo_is_not_loaded(serve_tiny: ServeTiny, tmp_path: Path, task: Task) -> None:
    """No engine waits for a writer."""
    os.mkfifo(tmp_path / "openvino_model.xml")
    with trio.fail_after(60), pytest.raises(ConfigError, match="not a regular file"):
        async with serve_tiny(path=tmp_path, task=task):
            pytest.fail("it was loaded")


async def test_a_folder_without_a_model_is_refused_with_what_is_missing(serve_tiny: ServeTiny, tmp_path: Path) -> None:
    """A path that leads nowhere is told as well."""
    with pytest.raises(ConfigError, match=r"without openvino_model\.xml"):
        async with serve_tiny(path=tmp_path):
            pytest.fail("it was loaded")
    with pytest.raises(ConfigError, match="does not exist"):
        async with serve_tiny(path=tmp_path / "none"):
            pytest.fail("it was loaded")
