"""``SegPostprocess``: class masks as images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from paddle_serving_app.reader.opencv import cv2
from paddle_serving_app.reader.palette import palette

__all__ = ["SegPostprocess"]

_DEFAULT_SIDE: Final = 512


@dataclass
class SegPostprocess:
    """Writes a class mask, and a color image of it in the size of the original, next to the image file.

    ``photo.jpg`` gets ``photo_jpg_mask.png`` and ``photo_jpg_result.png``.
    """

    class_num: int

    def __call__(self, image_with_result: Mapping[str, Any]) -> None:
        """Write both files.

        ``filename`` is the image; the last other value is the mask [height, width] or of 512 x 512 classes.

        Raises:
            ValueError: ``filename`` or the mask is missing, or the file is not an image.
        """
        masks = [value for key, value in image_with_result.items() if key != "filename" and ".lod" not in key]
        if "filename" not in image_with_result or not masks:
            raise ValueError(
                f"SegPostprocess needs filename and a mask, got {', '.join(image_with_result) or 'nothing'}"
            )
        file = Path(image_with_result["filename"])
        image: Any = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
        if image is None:
            raise ValueError(f"{file} is not an image that OpenCV can read")
        mask = np.squeeze(np.asarray(masks[-1])).astype(np.uint8)
        if mask.ndim != 2:  # noqa: PLR2004 - height and width
            mask = mask.reshape(_DEFAULT_SIDE, _DEFAULT_SIDE)
        colours = cv2.resize(palette(256)[mask], image.shape[1::-1], interpolation=cv2.INTER_CUBIC)
        target = file.with_name(f"{file.stem}_{file.suffix.removeprefix('.')}")
        cv2.imwrite(f"{target}_mask.png", mask)
        cv2.imwrite(f"{target}_result.png", colours)
