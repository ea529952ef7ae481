"""GGUF files are made into folders once, by their content, and nothing is written beside them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.openvino.engine.gguf_header import GgufError, read_header
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


async def test_a_folder_without_a_model_is_refused_with_what_is_missing(serve_tiny: ServeTiny, tmp_path: Path) -> None:
    """A path that leads nowhere is told as well."""
    with pytest.raises(ConfigError, match=r"without openvino_model\.xml"):
        async with serve_tiny(path=tmp_path):
            pytest.fail("it was loaded")
    with pytest.raises(ConfigError, match="does not exist"):
        async with serve_tiny(path=tmp_path / "none"):
            pytest.fail("it was loaded")
