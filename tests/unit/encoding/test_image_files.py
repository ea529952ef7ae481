from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ovmstrio.encoding.image_files import ImageFileError, decoded_upright, upright_size

PIXELS = np.arange(30, dtype=np.uint8).reshape(2, 5, 3)
RED = (255, 0, 0)


def _file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (1, 4)), (6, (1, 0)), (8, (0, 4))])
def test_images_are_turned_as_their_metadata_say(form: str, orientation: int, corner: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    how = {"tiffinfo": {0x112: orientation}} if form == "TIFF" else {"exif": exif}
    encoded = _file(Image.fromarray(PIXELS), form, **how)
    image = decoded_upright(encoded)
    assert image.size == upright_size(encoded, 10) == ((2, 5) if orientation in {6, 8} else (5, 2))
    if form in {"PNG", "TIFF"}:
        assert image.getpixel((0, 0)) == tuple(PIXELS[corner])


@pytest.mark.parametrize(
    ("image", "options", "pixel"),
    [
        (Image.new("RGB", (1, 1), RED), {}, RED),
        (Image.new("L", (1, 1), 7), {}, (7, 7, 7)),
        (Image.new("1", (1, 1), 1), {}, (255, 255, 255)),
        (Image.new("RGBA", (1, 1), (*RED, 0)), {}, (255, 255, 255)),
        (Image.new("LA", (1, 1), (0, 255)), {}, (0, 0, 0)),
        (Image.new("P", (1, 1)), {"transparency": 0}, (255, 255, 255)),
        (Image.fromarray(np.full((1, 1), 0x1234, np.uint16)), {}, (0x12, 0x12, 0x12)),
    ],
)
def test_images_become_rgb_on_white(image: Image.Image, options: dict[str, Any], pixel: tuple[int, ...]) -> None:
    assert decoded_upright(_file(image, **options)).getpixel((0, 0)) == pixel


def test_sizes_are_read_from_the_head_of_a_file() -> None:
    encoded = _file(Image.effect_noise((40, 20), 50))
    assert upright_size(encoded[:100], 800) == (40, 20)
    with pytest.raises(ImageFileError, match="40 x 20 pixels exceed the limit of 799"):
        upright_size(encoded, 799)
    with pytest.raises(ImageFileError, match="truncated"):
        decoded_upright(encoded[:100])
    with pytest.raises(ImageFileError, match="its 4 bytes are not an image"):
        upright_size(b"text", 9)
