"""Preparation of the sample ops_ocr: writes the Paddle models, their descriptions, the script and its configuration."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from ovmstrio.samples.copying import copy_files

__all__ = ["ENTRIES"]

_MODELS: Final = {"ocr_det": "ch_PP-OCRv4_det_infer", "ocr_rec": "ch_PP-OCRv4_rec_infer"}
_DESCRIPTION: Final = "serving_server_conf.prototxt"
_copy_service = copy_files(__file__, "web_service.py", "config.yml")


def write_service(files: Path, directory: Path) -> None:
    """Write the folder for ``ovms paddle run web_service.py``."""
    _copy_service(files, directory)
    shutil.copyfile(files / "ppocr_keys_v1.txt", directory / "characters.txt")
    for name, source in _MODELS.items():
        (directory / name).mkdir()
        for filename in ("inference.pdmodel", "inference.pdiparams"):
            shutil.copyfile(files / source / filename, directory / name / filename)
        shutil.copyfile(Path(__file__).parent / name / _DESCRIPTION, directory / name / _DESCRIPTION)


ENTRIES = {"ops_ocr": write_service}
