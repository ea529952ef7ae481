"""The first handler: a picture file becomes a batch of one RGB picture."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from pyovms import Tensor


def file_content(tensor: Tensor) -> bytes:
    """Give the bytes of a file, without the length that KServe clients write before an element of BYTES."""
    data = bytes(tensor)
    prefixed = tensor.datatype == "BYTES" and int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:] if prefixed else data


class OvmsPythonModel:
    """Decodes whatever Pillow reads; the model itself scales the picture to the size that it needs."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Handle one file: UINT8 [1,height,width,3] goes out."""
        with Image.open(io.BytesIO(file_content(inputs[0]))) as image:
            pixels = np.asarray(image.convert("RGB"))
        return [Tensor("pixels_py", pixels[np.newaxis])]
