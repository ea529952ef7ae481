from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from ovmstrio.core.errors import ConfigError
from ovmstrio.core.generation import Task
from ovmstrio.inference.engine.gguf import GgufError, read_header
from ovmstrio.text.kind import LOADERS
from tests.support.served_text_models import greedy, made, text_of
from tests.support.tiny_llm import write_tiny_gguf
from tests.support.waits import WAIT_SECONDS
from tests.system.text.conftest import ServeTiny


async def test_gguf_file_is_converted_once_and_makes_the_same_text(serve_tiny: ServeTiny, tmp_path: Path) -> None:
    # The library's tokenizer of a GGUF file keeps 8192 tokens of a text.
    file = write_tiny_gguf(tmp_path / "model.gguf", context=10_000)
    cache = tmp_path / "cache"
    async with serve_tiny() as model:
        expected = text_of(await made(model, greedy("hello", 30)))
    async with serve_tiny(path=file, cache_dir=cache, cache_size=0.02) as model:
        assert text_of(await made(model, greedy("hello", 30))) == expected
        assert model.limits.context_length == 10_000
        assert [len(tokens) for tokens in await model.tokenize([" a" * 9000])] == [9000]
    (folder,) = (cache / "text_models").iterdir()
    marked = folder.stat().st_mtime_ns
    (tmp_path / "other").mkdir()
    other = file.rename(tmp_path / "other" / "renamed.gguf")
    async with serve_tiny(path=other.parent, cache_dir=cache) as model:
        assert text_of(await made(model, greedy("hello", 30))) == expected
    assert [each.stat().st_mtime_ns for each in (cache / "text_models").iterdir()] == [marked]
    assert [each.name for each in other.parent.iterdir()] == ["renamed.gguf"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a model", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "damaged"),
    ],
)
async def test_invalid_gguf_file_is_refused(
    serve_tiny: ServeTiny, tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(GgufError, match=message):
        _header(content, tmp_path)
    await _check_refused(serve_tiny, message, path=tmp_path / "model.gguf", cache_dir=tmp_path / "cache")


async def _check_refused(serve_tiny: ServeTiny, message: str, **settings: Any) -> None:
    with trio.fail_after(WAIT_SECONDS), pytest.raises(ConfigError, match=message):
        async with serve_tiny(**settings):
            pytest.fail("the model was loaded")


def _header(content: bytes, tmp_path: Path) -> Mapping[str, Any]:
    (tmp_path / "model.gguf").write_bytes(content)
    return read_header(tmp_path / "model.gguf")


def gguf(tensors: Sequence[tuple[bytes, tuple[int, ...], int, int]], *keys: bytes, data: int = 0) -> bytes:
    """Encode a file of tensors (name, shape, type, offset) with so many bytes of data."""
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    for name, shape, kind, offset in tensors:
        content += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        content += struct.pack("<IQ", kind, offset)
    return content + bytes(-len(content) % 32) + bytes(data)


def integer(key: bytes, value: int) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf([(b"a", (32,), 0, 0), (b"b", (64,), 8, 128)], data=195), 'tensor "b" is incomplete: expected 68 bytes'),
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
def test_gguf_file_of_invalid_tensors_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=re.escape(message)):
        _header(content, tmp_path)


def test_gguf_file_needs_no_padding_at_its_end(tmp_path: Path) -> None:
    content = gguf([(b"b", (64,), 8, 128), (b"a", (32,), 0, 0)], integer(b"k", 7), data=196)
    assert _header(content, tmp_path) == {"k": 7}


@pytest.mark.parametrize("cut", [1, 5000])
async def test_truncated_gguf_file_is_refused(serve_tiny: ServeTiny, tmp_path: Path, cut: int) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf")
    os.truncate(file, file.stat().st_size - cut)
    message = r'tensor ".*" is incomplete: expected \d+ bytes, got \d+.*model\.gguf'
    await _check_refused(serve_tiny, message, path=file, cache_dir=tmp_path / "cache")


async def test_unsupported_architecture_is_named(serve_tiny: ServeTiny, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    key, value = b"general.architecture", b"gemma3"
    text = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    await _check_refused(serve_tiny, r"llama, qwen2, qwen3.*gemma3", path=file, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (["openvino_language_model.xml"], ".", r"without openvino_text_embeddings_model\.xml, openvino_tokenizer\.xml"),
        (["model_index.json"], ".", "an image model cannot generate text"),
        (["openvino_encoder_model.xml"], ".", "set the task to speech2text or text2speech"),
        ([], ".", r"without openvino_model\.xml"),
        ([], "none", "does not exist"),
    ],
)
async def test_folder_without_a_language_model_is_refused(
    serve_tiny: ServeTiny, tmp_path: Path, files: list[str], path: str, message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    await _check_refused(serve_tiny, message, path=tmp_path / path)


@pytest.mark.parametrize("task", list(LOADERS))
async def test_folder_with_a_fifo_is_refused(serve_tiny: ServeTiny, tmp_path: Path, task: Task) -> None:
    os.mkfifo(tmp_path / "openvino_model.xml")
    await _check_refused(serve_tiny, "not a regular file", path=tmp_path, task=task)
