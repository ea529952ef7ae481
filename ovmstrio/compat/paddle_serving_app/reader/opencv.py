"""Import of OpenCV, with a hint if it is missing."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from ovmstrio.extras import Extra, install_command

__all__ = ["cv2"]


def _load() -> ModuleType:
    try:
        import cv2 as found  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        if error.name != "cv2":
            raise
        message = f"image readers need OpenCV; install it: {install_command(Extra.PADDLE)}"
        raise ModuleNotFoundError(message, name="cv2") from error
    return found


if TYPE_CHECKING:
    import cv2
else:
    cv2 = _load()
