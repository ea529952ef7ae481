"""Program of an image-generation process: all images of a request at once, in the order of requests.

::

    first                                     ["loaded", facts] or ["failed", reason]
    ["open", number, prompt, request]         see :mod:`.chunk_worker`
    ["part", number]                          ["part", images] or ["refused", error]
    number 0, after a denoising step          [number, steps so far, all steps, images or None]
"""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import openvino as ov

from ovmstrio.core.errors import InvalidField, ModelFailure, NotSupported
from ovmstrio.inference.engine.chunk_worker import ChunkWorker, run_process
from ovmstrio.inference.engine.messages import FAILED, LOADED
from ovmstrio.inference.engine.pipeline import library_error_message
from ovmstrio.util.extras import Extra, install_command
from ovmstrio.util.truncation import encode_text

if TYPE_CHECKING:
    from collections.abc import Callable

    import openvino_genai as genai
    from PIL import Image

    from ovmstrio.isolation.blocking_channel import BlockingChannel

# ----------------------------------------------------------------------
# Pipelines
# ----------------------------------------------------------------------


class _Pipelines(NamedTuple):
    """Pipelines over the same weights; None if the model does not support a pipeline."""

    text_to_image: genai.Text2ImagePipeline | None
    image_to_image: genai.Image2ImagePipeline | None
    inpainting: genai.InpaintingPipeline | None


def _load(options: dict[str, Any]) -> _Pipelines:
    """Load the pipelines; each is derived from the one before, so that weights are in memory once.

    Raises:
        RuntimeError: the model supports none of them.
    """
    import openvino_genai as genai  # noqa: PLC0415 - import errors are reported

    failures: list[Exception] = []

    def first(*makers: Callable[[], Any]) -> Any:
        for make in makers:
            try:
                return make()
            except (RuntimeError, TypeError) as error:
                failures.append(error)
        sys.stderr.write(f"pipeline not available: {library_error_message(failures[-1])}\n")
        return None

    def compiled(kind: Any) -> Any:
        pipeline = kind(options["folder"])
        if shape := options["static_shape"]:
            pipeline.reshape(*shape)
        # One device, or those of the text encoders, the denoising model and the autoencoder.
        pipeline.compile(*options["device"].split(), **options["properties"])
        return pipeline

    kinds = genai.Text2ImagePipeline, genai.Image2ImagePipeline, genai.InpaintingPipeline
    texts, edits, paints = kinds
    inpainting = first(lambda: compiled(paints))
    image_to_image = first(lambda: edits(inpainting), lambda: compiled(edits))
    text_to_image = first(lambda: texts(image_to_image), lambda: texts(inpainting), lambda: compiled(texts))
    found = _Pipelines(text_to_image, image_to_image, inpainting)
    if not any(found):
        raise failures[-1]
    return found


# ----------------------------------------------------------------------
# Image files
# ----------------------------------------------------------------------

_OPAQUE: Final = 255
_ALPHA: Final = "A"


def _decoded(data: bytes, field: str, max_pixels: int) -> Image.Image:
    from ovmstrio.encoding.image_files import ImageFileError, decoded  # noqa: PLC0415 - import errors are reported

    try:
        return decoded(data, max_pixels)
    except ImageFileError as error:
        raise InvalidField(f"Image parsing failed: {error}", field=field) from None


def _tensor(image: Image.Image) -> ov.Tensor:
    return ov.Tensor(np.asarray(image.convert("RGB"))[np.newaxis].copy())


def _repainted_area(mask: Image.Image) -> Image.Image:
    """Return a mask whose white pixels are repainted, which is also the meaning of masks without transparent pixels.

    In OpenAI's API transparent pixels are repainted.
    """
    from PIL import ImageChops  # noqa: PLC0415 - as above

    if mask.getbands()[-1] != _ALPHA:
        return mask
    alpha = mask.getchannel(_ALPHA)
    return mask if alpha.getextrema()[0] == _OPAQUE else ImageChops.invert(alpha)


def _encoded(pixels: np.ndarray[Any, np.dtype[np.uint8]], form: str, compression: int | None) -> bytes:
    from PIL import Image  # noqa: PLC0415 - as above

    file = io.BytesIO()
    quality = {} if compression is None or form == "png" else {"quality": compression}
    Image.fromarray(pixels).save(file, form, **quality)
    return file.getvalue()


# ----------------------------------------------------------------------
# Program
# ----------------------------------------------------------------------

_UNSOLICITED: Final = 0
_MIN_SIDE: Final = 16  # pixels per latent of any model
_REFUSAL: Final = re.compile(r"(Check '.*' failed at|Exception from) \S*/image_generation/", re.DOTALL)
"""Start of the library's errors for options that a model does not accept."""


def _valid(value: Any) -> Any:
    """Return an option; in a text, unpaired surrogates are replaced."""
    return encode_text(value).decode() if isinstance(value, str) else value


class _Request(NamedTuple):
    pipeline: Any
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    form: str
    compression: int | None
    partial_images: int


class _Program(ChunkWorker[_Request]):
    def __init__(self, channel: BlockingChannel, pipelines: _Pipelines) -> None:
        super().__init__(channel)
        self._pipelines = pipelines

    def open(self, *arguments: Any) -> _Request:
        prompt, asked = arguments
        inputs = [_valid(prompt)]
        options = {name: _valid(value) for name, value in asked["options"].items()}
        pipeline: Any = self._pipelines.text_to_image
        does = "generate images from text alone: send an image to change"
        if asked["image"]:
            pipeline, does = self._pipelines.image_to_image, "change images without a mask"
            image = _decoded(asked["image"], "image", asked["max_pixels"])
            if min(image.size) < _MIN_SIDE and "width" not in options:
                expected = f"at least {_MIN_SIDE}x{_MIN_SIDE} pixels, or a size to enlarge it"
                raise InvalidField(f"image: expected {expected}", field="image", got=f"{image.width}x{image.height}")
            inputs.append(_tensor(image))
            if asked["mask"]:
                pipeline, does = self._pipelines.inpainting, "repaint the area of a mask"
                mask = _decoded(asked["mask"], "mask", asked["max_pixels"])
                if mask.size != image.size:
                    expected = f"the size of the image, {image.width}x{image.height}"
                    raise InvalidField(f"mask: expected {expected}", field="mask", got=f"{mask.width}x{mask.height}")
                inputs.append(_tensor(_repainted_area(mask)))
        if pipeline is None:
            raise NotSupported(f"the model cannot {does}")
        return _Request(pipeline, tuple(inputs), options, asked["form"], asked["compression"], asked["partial_images"])

    def make_part(self, number: int, opened: _Request) -> dict[str, Any]:
        has_stepped = False
        partial_steps: set[int] = set()
        failure: BaseException | None = None

        def report_step(step: int, steps: int, latents: ov.Tensor) -> bool:
            """Return whether to stop; called in a thread of the library, while later steps may run."""
            nonlocal has_stepped, partial_steps, failure
            if not has_stepped:
                has_stepped = True
                parts = opened.partial_images + 1
                partial_steps = {steps * part // parts for part in range(1, parts)}
            done = step + 1
            try:
                partial = self._files(opened.pipeline.decode(latents), opened) if done in partial_steps else None
                self.channel.send([_UNSOLICITED, [number, done, steps, partial]])
                return not self.is_wanted(number)
            except BaseException as error:  # noqa: BLE001 - raised below; here it would abort the process
                failure = error
                return True

        try:
            pixels = opened.pipeline.generate(*opened.inputs, **opened.options, callback=report_step)
            files = self._files(pixels, opened) if pixels.get_size() else None
        except Exception as error:  # the library raises builtin exception types
            reason = library_error_message(error)
            if not has_stepped and _REFUSAL.match(str(error)):
                raise InvalidField(f"the model does not accept the request: {reason}") from error
            raise ModelFailure(f"the model failed: {reason}") from error
        if failure is not None:
            raise failure
        if files is None:
            raise ModelFailure("the request is closed")
        return {**files, "is_last": True}

    def _files(self, pixels: ov.Tensor, opened: _Request) -> dict[str, Any]:
        images = pixels.data
        files = [_encoded(image, opened.form, opened.compression) for image in images]
        return {"files": files, "width": images.shape[2], "height": images.shape[1]}


def serve(channel: BlockingChannel, number: int, options: dict[str, Any]) -> None:
    """Serve the model named in the first message."""
    try:
        import PIL  # noqa: F401, PLC0415 - required by each request

        pipelines = _load(options)
    except ImportError as error:
        message = f"image generation requires {error.name or error}, which is not installed"
        channel.send([number, [FAILED, f"{message}: {install_command(Extra.LLM)}"]])
        return
    except Exception as error:  # noqa: BLE001 - the server reports any reason
        channel.send([number, [FAILED, library_error_message(error)]])
        return
    channel.send([number, [LOADED, {}]])
    _Program(channel, pipelines).run()


if __name__ == "__main__":
    run_process(serve)
