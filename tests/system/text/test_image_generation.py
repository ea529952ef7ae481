from __future__ import annotations

import io
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from PIL import Image

from ovmstrio.core.errors import ConfigError, InvalidField, NotSupported
from ovmstrio.core.generation import Task
from ovmstrio.core.images import ImageFormat, ImagePart, ImageRequest
from ovmstrio.text.image_generation import ImageModel
from tests.support.served_text_models import ModelHost, hosts_of, on_model_loop, server_of
from tests.support.tiny_diffusion import SIZE, library_images, write_tiny_diffusion
from tests.support.waits import until_async

ServeImages = Callable[..., AbstractAsyncContextManager[ImageModel]]
Pixels = Any
FAST = {"num_inference_steps": 4, "rng_seed": 7}
STEPS = 1000


@pytest.fixture(scope="module")
def diffusion_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_diffusion(tmp_path_factory.mktemp("diffusion"))


@pytest.fixture
def serve_images(diffusion_folder: Path) -> ServeImages:
    """Return a function that serves a Stable Diffusion pipeline with settings while a block lasts."""
    return server_of(name="painter", path=diffusion_folder, task=Task.IMAGE_GENERATION)


@pytest.fixture(scope="module")
def painter(diffusion_folder: Path) -> Iterator[ModelHost]:
    """Serve a pipeline for all tests of the module."""
    settings = {"max_resolution": "1024x1024", "max_num_inference_steps": STEPS, "default_num_inference_steps": 2}
    with hosts_of(server_of(name="painter", path=diffusion_folder, task=Task.IMAGE_GENERATION)) as host_of:
        yield host_of(**settings)


def noise(width: int = SIZE, height: int = SIZE) -> Pixels:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)


def half_mask() -> Pixels:
    """Return a mask whose upper half is white."""
    mask = np.zeros((SIZE, SIZE, 3), np.uint8)
    mask[: SIZE // 2] = 255
    return mask


def file_of(pixels: Pixels, form: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def pixels_of(part: ImagePart) -> Pixels:
    return np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in part.files])


async def generated(model: ImageModel, prompt: str = "a cat", **fields: Any) -> list[ImagePart]:
    request = ImageRequest(prompt, **{"options": FAST, **fields})
    with trio.fail_after(60):
        async with model.generate_images(request) as images:
            return [part async for part in images]


@on_model_loop
async def test_pictures_are_those_of_the_library_with_the_same_seed(
    painter: ImageModel, diffusion_folder: Path, tmp_path: Path
) -> None:
    several = {**FAST, "num_images_per_prompt": 2, "width": 96, "height": 48, "negative_prompt": "dogs"}
    weak = {**FAST, "strength": 0.5, "guidance_scale": 3.0}
    image, mask = noise(), half_mask()
    # OpenAI's clients mark the area with transparent pixels.
    transparent = np.concatenate([image, 255 - mask[..., :1]], 2)
    parts = [
        *await generated(painter, options=several),
        *await generated(painter, options=weak, image=file_of(image)),
        *await generated(painter, options=weak, image=file_of(image), mask=file_of(mask)),
        *await generated(painter, options=weak, image=file_of(image), mask=file_of(transparent)),
        *await generated(painter, options=several),
    ]
    calls = [
        {"prompt": "a cat", **several},
        {"prompt": "a cat", **weak, "inputs": [image[None]]},
        {"prompt": "a cat", **weak, "inputs": [image[None], mask[None]]},
    ]
    expected = library_images(diffusion_folder, calls, tmp_path)
    assert [part.size for part in parts] == [(96, 48), *[(SIZE, SIZE)] * 3, (96, 48)]
    assert [pixels_of(part).tolist() for part in parts] == [expected[at].tolist() for at in (0, 1, 2, 2, 0)]
    assert len({each.tobytes() for each in expected}) == 3


@on_model_loop
async def test_requests_without_a_seed_get_different_pictures(painter: ImageModel) -> None:
    files = [part.files for _ in range(2) for part in await generated(painter, options={})]
    assert files[0] != files[1]


@on_model_loop
async def test_partial_images_come_before_the_final_one(painter: ImageModel) -> None:
    # Steps last longer than the decoding of a partial image.
    options = {"num_inference_steps": 40, "width": 1024, "height": 1024}
    parts = await generated(painter, options=options, partial_images=3, form=ImageFormat.WEBP, compression=10)
    without = await generated(painter)
    assert [part.is_partial for part in parts[-2:]] == [True, False]
    assert {Image.open(io.BytesIO(file)).format for part in parts for file in part.files} == {"WEBP"}
    assert len({part.files for part in parts}) == len(parts) <= 4
    assert [part.is_partial for part in without] == [False]


@on_model_loop
async def test_requests_that_are_left_stop_after_the_step_and_invalid_ones_do_not_wait(painter: ImageModel) -> None:
    # Takes minutes.
    options = {"num_inference_steps": STEPS, "num_images_per_prompt": 10, "width": 1024, "height": 1024}
    for _ in range(2):
        with trio.fail_after(60):
            async with painter.generate_images(ImageRequest("a cat", options=options)) as running:
                await until_async(lambda: painter.queue.progress[0] >= 2)
                assert running.steps[1] == STEPS
                assert painter.facts["denoising steps"].endswith(f" of {STEPS}")
                with pytest.raises(InvalidField, match="Image parsing failed"):
                    await generated(painter, image=b"no picture")
        assert len(await generated(painter)) == 1
    assert (painter.open_requests, painter.queue.progress) == (0, (0, 0))


def png_header(width: int, height: int) -> bytes:
    """Return a small PNG file that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    bomb = zlib.compress(bytes(1_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\x02\0\0\0") + chunk(b"IDAT", bomb) + chunk(b"IEND", b"")


@on_model_loop
async def test_invalid_requests_are_refused_and_the_process_continues(painter: ImageModel) -> None:
    image = file_of(noise())
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"image": b"no picture"}, "image", "10 bytes are not an image of a known format"),
        ({"image": image[:-100]}, "image", "Image parsing failed"),
        ({"image": file_of(noise(64, 15))}, "image", "at least 16x16 pixels, or a size to enlarge it; got 64x15"),
        ({"image": png_header(50_000, 50_000)}, "image", "Image parsing failed: .*50000 x 50000 pixels|exceeds limit"),
        ({"image": image, "mask": b"no picture"}, "mask", "Image parsing failed"),
        ({"image": image, "mask": file_of(noise(32, 64))}, "mask", "expected the size of the image, 64x64; got 32x64"),
        (
            {"options": {"num_images_per_prompt": 11}},
            "n",
            r"n must be at most 10 \(max_num_.*\); got 11",
        ),
        (
            {"options": {"num_inference_steps": 1001}},
            "num_inference_steps",
            r"at most 1000 \(max_num_inference_steps\); got 1001",
        ),
        ({"options": {"width": 1032}}, "width", r"width must be at most 1024 \(max_resolution\); got 1032"),
        ({"options": {"width": 100}}, "", "must be divisible by 8"),
        ({"options": {"prompt_2": "x"}}, "", "Prompt 2 is not used by Stable Diffusion"),
        ({"image": image, "options": {"strength": 0.01, "num_inference_steps": 2}}, "", "strength"),
    ]
    large = {**FAST, "width": 64, "height": 64, "rng_seed": 2**63 - 1}
    pid = painter.pid
    for fields, field, message in refusals:
        with pytest.raises(InvalidField, match=message) as caught:
            await generated(painter, **fields)
        assert caught.value.field == field
    small = file_of(noise(64, 15))
    assert len(await generated(painter, prompt="\ud800 \0 \N{CAT FACE}", image=small, options=large)) == 1
    assert (painter.pid, painter.open_requests) == (pid, 0)


async def test_resolutions_are_compiled_into_the_model_or_chosen_by_requests(
    serve_images: ServeImages, diffusion_folder: Path, tmp_path: Path
) -> None:
    async with serve_images(resolution="96x64", num_images_per_prompt=2, guidance_scale=5.0) as model:
        (part,) = await generated(model)
        for options, message in (
            ({"width": 64, "height": 64}, "size must be 96x64; got 64x64"),
            ({"num_images_per_prompt": 1}, "n must be 2, which is compiled into the model; got 1"),
            ({"guidance_scale": 1.0}, "guidance_scale must be 5, which is compiled into the model; got 1"),
        ):
            with pytest.raises(InvalidField, match=message):
                await generated(model, options={**FAST, **options})
    async with serve_images(resolution="64x64 96x64", default_resolution="96x64") as model:
        parts = [*await generated(model), *await generated(model, options={**FAST, "width": 64, "height": 64})]
        with pytest.raises(InvalidField, match="size must be 64x64 or 96x64; got 64x96"):
            await generated(model, options={**FAST, "width": 64, "height": 96})
    call = {"prompt": "a cat", **FAST, "num_images_per_prompt": 2, "guidance_scale": 5.0, "width": 96, "height": 64}
    (expected,) = library_images(diffusion_folder, [call], tmp_path)
    assert pixels_of(part).tolist() == expected.tolist()
    assert [part.size for part in parts] == [(96, 64), (64, 64)]


async def test_incomplete_pipelines_are_refused_or_served_in_part(
    serve_images: ServeImages, diffusion_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no image-generation model found.*without vae_decoder/openvino_model\.xml"):
        async with serve_images(path=tmp_path):
            pytest.fail("the model was loaded")
    folder = tmp_path / "text only"
    shutil.copytree(diffusion_folder, folder)
    shutil.rmtree(folder / "vae_encoder")
    async with serve_images(path=folder) as model:
        assert len(await generated(model)) == 1
        with pytest.raises(NotSupported, match="the model cannot change images without a mask"):
            await generated(model, image=file_of(noise()))
