"""Conversion of GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from tests.runtimes.generation.conftest import ServeTiny
from tests.runtimes.generation.test_text_model import greedy, made, text_of
from tests.support.tiny_llm import CONTEXT, write_tiny_gguf


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


def gguf(tensors: Sequence[tuple[bytes, tuple[int, ...], int, int]], *keys: bytes, data: int = 0) -> bytes:
    """Encode a file of tensors (name, shape, type, offset) with so many bytes of data."""
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    for name, shape, kind, offset in tensors:
        content += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        content += struct.pack("<IQ", kind, offset)
    return content + bytes(-len(content) % 32) + bytes(data)
