"""Python node that decodes a picture file to a batch of one RGB picture."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from pyovms import Tensor


def file_content(tensor: Tensor) -> bytes:
    """Return the bytes of a file, without the length prefix that KServe clients write before a BYTES element."""
    data = bytes(tensor)
    prefixed = tensor.datatype == "BYTES" and int.from_bytes(data[:4], "little") == len(data) - 4
    return data[4:] if prefixed else data


class OvmsPythonModel:
    """Node that decodes any format that Pillow supports; the model resizes the picture."""

    def execute(self, inputs: list[Tensor]) -> list[Tensor]:
        """Decode one file to UINT8 [1,height,width,3]."""
        with Image.open(io.BytesIO(file_content(inputs[0]))) as image:
            pixels = np.asarray(image.convert("RGB"))
        return [Tensor("pixels_py", pixels[np.newaxis])]
