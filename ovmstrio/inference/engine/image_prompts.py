"""Prompts of models that take images: text with marks, its tokens, and the number of tokens of each image.

OpenVINO GenAI replaces the marks and tokenizes the text itself. It tells the number of tokens of a prompt only when its
request has left the batch. A probe measures each new image size: a request with a blank image, cancelled before its
first step, which costs one run of the vision encoder.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ovmstrio.core.errors import InvalidField, InvalidRequest
from ovmstrio.core.generation import IMAGE_MARK, Conversation, Image, image_mark
from ovmstrio.encoding.image_files import ImageFileError, blank_image, upright_size
from ovmstrio.inference.engine.pipeline import ImagePrompt, library_error_message

if TYPE_CHECKING:
    from ovmstrio.core.generation import Prompt
    from ovmstrio.inference.engine.pipeline import Pipeline
    from ovmstrio.inference.engine.prompts import PromptTokenizer

MAX_PIXELS: Final = 2**25
"""Limit of the pixels of all images of a request, which need 100 MB once decoded."""

_MAX_COUNTS: Final = 4096
_PROBE: Final = 0  # request number of probes; those of a batch begin with 1
_DIGEST_BYTES: Final = 7

_LETTER: Final = "a"

# Tokens of a mark may absorb line feeds on both sides, a line feed may join the punctuation before it, and the tokens
# of several line feeds may depend on whether a text or a special token follows.
_PLACE: Final = re.compile(
    rf"((?:[.,:;!?)]{{0,4}}\s{{1,8}})?){re.escape(IMAGE_MARK)}(\d+)>((?:\s{{0,7}}\n)?)(?=([^\s<]?))"
)


class _Place(NamedTuple):
    """Size of an image, and the characters next to its mark whose tokens may depend on it."""

    size: tuple[int, int]
    before: str
    after: str
    precedes_text: bool


class ImagePromptTokenizer:
    """Tokenizes prompts with images; an image has unique negative numbers as tokens."""

    def __init__(self, pipeline: Pipeline, prompts: PromptTokenizer) -> None:
        self._pipeline = pipeline
        self._prompts = prompts
        self._counts: OrderedDict[_Place, int] = OrderedDict()
        self._probe: tuple[_Place, Any] | None = None

    def prompt_of(self, prompt: Prompt, rendered: str | None) -> ImagePrompt:
        """Return the prompt for the pipeline; ``rendered`` is the text of a conversation.

        Raises:
            InvalidRequest: token ids are not those of a text, or a mark has no image.
        """
        if isinstance(prompt, Conversation):
            text = self._prompts.render(prompt) if rendered is None else rendered
            return self._checked(ImagePrompt(text, prompt.images))
        if isinstance(prompt, str):
            return self._checked(ImagePrompt(prompt, (), adds_special_tokens=True))
        tokens = self._prompts.tokenize_prompt(prompt)
        text = self._pipeline.tokenizer.decode(tokens, skip_special_tokens=False)
        if self._prompts.encode_prompt(text, add_special_tokens=False) != tokens:
            raise InvalidRequest("a model that takes images reads texts: these tokens are not those of a text")
        return self._checked(ImagePrompt(text, ()))

    def _checked(self, prompt: ImagePrompt) -> ImagePrompt:
        pixels = 0
        for image in prompt.images:
            width, height = _size(image)
            pixels += width * height
            if pixels > MAX_PIXELS:
                raise InvalidField(f"the images have more than {MAX_PIXELS} pixels in all", field=image.field)
        marked = [int(mark[2]) for mark in _PLACE.finditer(prompt.text)]
        if sorted(marked) != list(range(len(prompt.images))):
            missing = f"marks of images {marked} in the prompt, and {len(prompt.images)} images"
            raise InvalidRequest(f"the chat template leaves out or repeats images, or a text has a mark: {missing}")
        return prompt

    def tokenize(self, prompt: ImagePrompt) -> list[int] | None:
        """Return the tokens of a prompt, at least one; None until a probe has measured an image.

        Raises:
            InvalidRequest: the prompt is empty or too long, or the model rejects an image.
        """
        parts: list[list[int]] = []
        end, has_first = 0, prompt.adds_special_tokens
        for mark in _PLACE.finditer(prompt.text):
            image = prompt.images[int(mark[2])]
            place = _Place(_size(image), mark[1], mark[3], bool(mark[4]))
            if place not in self._counts:
                self._begin_probe(place, image.field)
                return None
            self._counts.move_to_end(place)
            parts.append(self._encode(prompt.text[end : mark.start()], add_special_tokens=has_first))
            parts.append(_numbers_of(image, self._counts[place]))
            end, has_first = mark.end(), False
        parts.append(self._encode(prompt.text[end:], add_special_tokens=has_first))
        tokens = [token for part in parts for token in part]
        if not tokens:
            raise InvalidRequest("the prompt has no tokens; send a text that is not empty")
        return tokens

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._prompts.encode_prompt(text, add_special_tokens=add_special_tokens) if text else []

    def _begin_probe(self, place: _Place, field: str) -> None:
        if self._probe is not None:
            return
        blank = Image(blank_image(*place.size), field)
        text = f"{place.before}{image_mark(0)}{place.after}{_LETTER * place.precedes_text}"
        prompt = ImagePrompt(text, (blank,))
        config = self._pipeline.defaults()
        config.max_new_tokens = 1
        try:
            handle = self._pipeline.add(_PROBE, prompt, config)
        except (RuntimeError, ValueError) as error:
            raise InvalidField(f"the model rejects the image: {library_error_message(error)}", field=field) from error
        handle.cancel()
        self._probe = place, handle

    def end_probe(self) -> None:
        """Record the result of a probe, after a step; the probe is repeated if the batch was rebuilt in that step."""
        if self._probe is None:
            return
        (place, handle), self._probe = self._probe, None
        try:
            count = handle.get_perf_metrics().get_num_input_tokens()
        except RuntimeError:
            return
        self._counts[place] = count - len(self._encode(_LETTER * place.precedes_text, add_special_tokens=False))
        if len(self._counts) > _MAX_COUNTS:
            self._counts.popitem(last=False)


def _numbers_of(image: Image, count: int) -> list[int]:
    """Return numbers that stand for the tokens of an image: equal ones for equal files, and never those of tokens."""
    begin = int.from_bytes(blake2b(image.source, digest_size=_DIGEST_BYTES).digest())  # type: ignore[arg-type]  # loaded
    return list(range(-begin - count, -begin))


def _size(image: Image) -> tuple[int, int]:
    try:
        return upright_size(image.source, MAX_PIXELS)  # type: ignore[arg-type]  # loaded
    except ImageFileError as error:
        raise InvalidField(f"the image cannot be read: {error}", field=image.field) from error
