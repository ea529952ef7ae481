"""Tokens of prompts with images, whose numbers the pipeline tells after a probe."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image as Picture

from ovmstrio.core.errors import InvalidField, InvalidRequest
from ovmstrio.core.generation import Conversation, Image
from ovmstrio.inference.engine.image_prompts import ImagePromptTokenizer
from ovmstrio.inference.engine.pipeline import ImagePrompt


def _image(width: int, height: int, shade: int = 0) -> Image:
    file = io.BytesIO()
    Picture.new("L", (width, height), shade).save(file, "PNG")
    return Image(file.getvalue(), f"{width}x{height}")


def _letters(text: str) -> str:
    """Return a text as the library tokenizes it: it writes a line feed after an image, and several are one token."""
    return re.sub("\n+", "\n", text.replace("<ov_genai_image_0>", "\n"))


class _Probe:
    def __init__(self, tokens: int) -> None:
        self.tokens: int | None = tokens
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def get_perf_metrics(self) -> Any:
        if self.tokens is None:
            raise RuntimeError("not available")
        return SimpleNamespace(get_num_input_tokens=lambda: self.tokens)


class _Pipeline:
    """Pipeline in which a letter is a token, and an image has as many tokens as its width."""

    def __init__(self) -> None:
        self.tokenizer = SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens)).upper())
        self.probes: list[_Probe] = []

    def defaults(self) -> Any:
        return SimpleNamespace()

    def add(self, number: int, prompt: ImagePrompt, _: Any) -> _Probe:
        width, height = Picture.open(io.BytesIO(cast("bytes", prompt.images[0].source))).size
        if width > 100 * height:
            raise RuntimeError("too wide")
        self.probes.append(_Probe(width + len(_letters(prompt.text))))
        return self.probes[-1]


class _Prompts:
    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in _letters(text)]

    def render(self, conversation: Conversation) -> str:
        return str(conversation.messages[0]["content"])

    def tokenize_prompt(self, prompt: tuple[int, ...]) -> list[int]:
        return list(prompt)


@pytest.fixture
def pipeline() -> _Pipeline:
    return _Pipeline()


@pytest.fixture
def tokenizer(pipeline: _Pipeline) -> ImagePromptTokenizer:
    prompts: Any = _Prompts()
    return ImagePromptTokenizer(cast("Any", pipeline), prompts)


def _prompt(text: str, *images: Image) -> Conversation:
    return Conversation(({"role": "user", "content": text},), images=images)


def _tokens(tokenizer: ImagePromptTokenizer, prompt: Any) -> list[int]:
    read = tokenizer.prompt_of(prompt, None)
    for _ in range(10):
        tokens = tokenizer.tokenize(read)
        if tokens is not None:
            return tokens
        tokenizer.end_probe()
    raise AssertionError("no tokens")


def test_each_size_is_measured_once(tokenizer: ImagePromptTokenizer, pipeline: _Pipeline) -> None:
    text = "a <ov_genai_image_0> b <ov_genai_image_1> c"
    first = _tokens(tokenizer, _prompt(text, _image(5, 2), _image(7, 2)))
    assert len(first) == len("a  b  c") + 5 + 7 + 2
    assert [probe.is_cancelled for probe in pipeline.probes] == [True, True]
    second = _tokens(tokenizer, _prompt(text, _image(5, 2), _image(7, 2, 9)))
    assert len(pipeline.probes) == 2
    changed = [one != other for one, other in zip(first, second, strict=True)]
    assert changed.count(True) == 9
    assert changed.index(True) == len("a \n b") + 5
    assert sum(token < 0 for token in first) == 16


def test_line_feeds_next_to_an_image_are_measured_with_it(tokenizer: ImagePromptTokenizer, pipeline: _Pipeline) -> None:
    image = _image(5, 2)
    for text in ("a:\n<ov_genai_image_0>\nb", "a<ov_genai_image_0>b", "a:\n<ov_genai_image_0>\nc"):
        tokens = _tokens(tokenizer, _prompt(text, image))
        assert len(tokens) == len(_letters(text)) + 5
    assert len(pipeline.probes) == 2


def test_a_probe_is_repeated_after_a_rebuild_of_the_batch(tokenizer: ImagePromptTokenizer, pipeline: _Pipeline) -> None:
    prompt = tokenizer.prompt_of(_prompt("<ov_genai_image_0>", _image(5, 2)), None)
    assert tokenizer.tokenize(prompt) is None
    assert tokenizer.tokenize(prompt) is None
    pipeline.probes[0].tokens = None
    tokenizer.end_probe()
    assert tokenizer.tokenize(prompt) is None
    tokenizer.end_probe()
    assert len(tokenizer.tokenize(prompt) or ()) == 6
    assert len(pipeline.probes) == 2


@pytest.mark.parametrize(
    "text", ["", "<ov_genai_image_0><ov_genai_image_0>", "<ov_genai_image_1>", "<ov_genai_image_0><ov_genai_image_1>"]
)
def test_a_template_must_keep_the_marks_of_images(tokenizer: ImagePromptTokenizer, text: str) -> None:
    with pytest.raises(InvalidRequest, match="leaves out or repeats images"):
        tokenizer.prompt_of(_prompt(text, _image(5, 2)), None)


def test_rejected_images_are_named(tokenizer: ImagePromptTokenizer) -> None:
    prompt = tokenizer.prompt_of(_prompt("<ov_genai_image_0><ov_genai_image_1>", _image(5, 2), _image(900, 2)), None)
    assert tokenizer.tokenize(prompt) is None
    tokenizer.end_probe()
    with pytest.raises(InvalidField, match="the model rejects the image: too wide") as refused:
        tokenizer.tokenize(prompt)
    assert refused.value.field == "900x2"


def test_prompts_without_images(tokenizer: ImagePromptTokenizer) -> None:
    assert _tokens(tokenizer, "ab") == [1, *b"ab"]
    assert _tokens(tokenizer, _prompt("ab")) == [*b"ab"]
    assert _tokens(tokenizer, tuple(b"AB")) == [*b"AB"]
    with pytest.raises(InvalidRequest, match="these tokens are not those of a text"):
        tokenizer.prompt_of(tuple(b"ab"), None)
    with pytest.raises(InvalidRequest, match="no tokens"):
        _tokens(tokenizer, _prompt(""))
