"""Image-generation service: loading, limits of requests, and requests that a process answers one after the other."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from prometheus_client.core import GaugeMetricFamily

from ovmstrio.core.errors import ErrorList, InvalidField
from ovmstrio.core.generation import Task
from ovmstrio.core.images import ImagePart, parse_resolution
from ovmstrio.serving.hosted_service import host_service
from ovmstrio.text.chunk_scheduler import (
    ChunkedModel,
    ChunkedRequest,
    ChunkScheduler,
    check_model_files,
    open_chunked_model,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    import trio
    from prometheus_client.core import Metric

    from ovmstrio.config.specs import TextModelSpec
    from ovmstrio.core.images import ImageRequest
    from ovmstrio.serving.kind import LoadContext

# ----------------------------------------------------------------------
# Requests
# ----------------------------------------------------------------------


class RunningImages(ChunkedRequest[ImagePart]):
    """A running request; see :class:`ovmstrio.core.images.ImageGeneration`.

    Attributes:
        steps: denoising steps so far, and all of them; 0 before the first one.
    """

    def __init__(self, number: int, turns: trio.Semaphore) -> None:
        super().__init__(number, turns)
        self.steps = (0, 0)

    def take(self, payload: dict[str, Any]) -> None:
        """Take the images."""
        self.put(_part(payload))
        self.end()


def _part(payload: dict[str, Any], *, is_partial: bool = False) -> ImagePart:
    return ImagePart(tuple(map(bytes, payload["files"])), (payload["width"], payload["height"]), is_partial)


class ImageScheduler(ChunkScheduler[RunningImages]):
    """All requests of one model; a metrics collector."""

    def __init__(self, spec: TextModelSpec, tasks: trio.Nursery, numbers: Iterator[int]) -> None:
        noun = "requests for images are being answered"
        super().__init__(RunningImages, spec.max_queue, tasks, noun, numbers, max_queue_time=spec.max_queue_time)
        self._model = spec.name

    @property
    def progress(self) -> tuple[int, int]:
        """Denoising steps of the running request so far, and all of them; 0 without a request."""
        return max((each.steps for each in self.running.values()), default=(0, 0))

    def hear(self, frame: Any) -> None:
        """Route the progress and the partial image of a denoising step to its request.

        Raises:
            ValueError, LookupError, TypeError: the message is malformed.
        """
        number, step, steps, partial_image = frame
        running = self.running.get(number)
        if running is not None:
            running.steps = (step, steps)
            if partial_image is not None:
                running.put(_part(partial_image, is_partial=True))

    def collect(self) -> Iterator[Metric]:
        """Yield the metric family of the progress."""
        step, steps = self.progress
        text = "Fraction of the running request's denoising steps that are done; 0 without a request."
        gauge = GaugeMetricFamily("ovmstrio_image_progress", text, labels=["model_name"])
        gauge.add_metric([self._model], step / steps if steps else 0)
        yield gauge


# ----------------------------------------------------------------------
# Service
# ----------------------------------------------------------------------

_PROGRAM: Final = "ovmstrio.inference.engine.image_program"
_MODEL: Final = "openvino_model.xml"
_INDEX: Final = "model_index.json"
_DENOISERS: Final = (f"unet/{_MODEL}", f"transformer/{_MODEL}")
_EXPECTED: Final = (
    f"a folder of a diffusers pipeline in OpenVINO's format, with {_INDEX}, {' or '.join(_DENOISERS)} and "
    f"vae_decoder/{_MODEL}, such as optimum-cli writes"
)
_COUNT, _STEPS, _GUIDANCE = "num_images_per_prompt", "num_inference_steps", "guidance_scale"
_SIDES: Final = ("width", "height")
_MAX_SEED: Final = 2**32
_DEFAULT_GUIDANCE: Final = 7.5  # of openvino-genai and OVMS


class ImageModel(ChunkedModel[ImageScheduler]):
    """One model; a :class:`ovmstrio.core.images.ImageGenerator`."""

    task: ClassVar = Task.IMAGE_GENERATION

    @property
    def facts(self) -> dict[str, Any]:
        """Current state, for introspection."""
        step, steps = self.queue.progress
        progress = f"{step} of {steps}" if steps else "none"
        return {"engine process": self.process.place, "requests": self.queue.open, "denoising steps": progress}

    @asynccontextmanager
    async def generate_images(self, request: ImageRequest) -> AsyncIterator[RunningImages]:
        """Generate images, as :meth:`ImageGenerator.generate_images`."""
        width, height = parse_resolution(self.spec.max_resolution)
        encoded = {
            "image": request.image,
            "mask": request.mask,
            "max_pixels": width * height,
            "options": self._options(request),
            "form": request.form.value,
            "compression": request.compression,
            "partial_images": request.partial_images,
        }
        async with self.queue.ask(self.process, request.prompt, encoded) as running:
            yield running

    def _options(self, request: ImageRequest) -> dict[str, Any]:
        """Return the generation options of a request with the defaults of the model.

        Raises:
            InvalidField: an option exceeds the limits of the model.
        """
        spec = self.spec
        allowed = (spec.resolution or "").split()
        fixed = _static_options(spec) if len(allowed) == 1 else {}
        options: dict[str, Any] = {
            "rng_seed": secrets.randbelow(_MAX_SEED),
            _STEPS: spec.default_num_inference_steps,
            **fixed,
        }
        if default := spec.default_resolution or next(iter(allowed), ""):
            options |= zip(_SIDES, parse_resolution(default), strict=True)
        options |= request.options
        errors = ErrorList()
        limits = {_COUNT: spec.max_num_images_per_prompt, _STEPS: spec.max_num_inference_steps}
        limits |= zip(_SIDES, parse_resolution(spec.max_resolution), strict=True)
        for name, most in limits.items():
            if options.get(name, 1) > most:
                limit = "max_resolution" if name in _SIDES else f"max_{name}"
                errors.add(_refused(name, f"must be at most {most} ({limit})", options[name]))
        if allowed and (size := f"{options['width']}x{options['height']}") not in allowed:
            errors.add(_refused("size", f"must be {' or '.join(allowed)}", size))
        for name, only in fixed.items():
            if options[name] != only:
                errors.add(_refused(name, f"must be {only:g}, which is compiled into the model", options[name]))
        errors.raise_if_any()
        return options


def _static_options(spec: TextModelSpec) -> dict[str, float]:
    """Return the options that are compiled into a model with a single resolution."""
    guidance = _DEFAULT_GUIDANCE if spec.guidance_scale is None else spec.guidance_scale
    return {_COUNT: spec.num_images_per_prompt or 1, _GUIDANCE: guidance}


def _refused(name: str, message: str, got: object) -> InvalidField:
    field = "n" if name == _COUNT else name
    return InvalidField(f"{field} {message}", field=field, got=str(got))


async def load_image_model(spec: TextModelSpec, context: LoadContext) -> ImageModel:
    """Load a model, which the caller must close.

    Raises:
        ConfigError: there is no such model.
        ModelFailure: it cannot be loaded.
    """
    await check_model_files(spec, _missing, _EXPECTED, noun="image-generation model")
    return await host_service(context.tasks, _open(spec, context), kind=spec.kind, name=spec.name)


@asynccontextmanager
async def _open(spec: TextModelSpec, context: LoadContext) -> AsyncIterator[ImageModel]:
    allowed = (spec.resolution or "").split()
    shape = None
    if len(allowed) == 1:
        width, height = parse_resolution(allowed[0])
        fixed = _static_options(spec)
        shape = [fixed[_COUNT], height, width, fixed[_GUIDANCE]]
    queue = partial(ImageScheduler, spec)
    options = {"static_shape": shape}
    opened = open_chunked_model(spec, _PROGRAM, options, queue, ImageModel, engines=context.engines)
    async with opened as model:
        with context.meters.collecting((model.queue,), ""):
            yield model


def _missing(folder: Path) -> str:
    absent = [name for name in (_INDEX, f"vae_decoder/{_MODEL}") if not (folder / name).is_file()]
    if not any((folder / name).is_file() for name in _DENOISERS):
        absent.append(" and ".join(_DENOISERS))
    return ", ".join(absent)
